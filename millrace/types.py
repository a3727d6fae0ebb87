"""The values that stages hand to each other. Every field names its unit, its shape and whose policy it belongs to.

Prompt ─► Request ─► engine ─► Response ─► Trajectory: a row of a generator's stream

Shapes: P prompt tokens, R response tokens of one trajectory, those of its environment included. Log-probabilities are
natural logarithms (nats), float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from configs.stored import DEFAULT_SOURCE

FinishReason = Literal["stop", "length", "unfinished"]


Message = Mapping[str, Any]
"""A message of a conversation, or the description of a tool, as chat templates take it: plain JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A response to learn from, in place of one that is sampled: messages, or the tokens of a stored rollout."""

    messages: tuple[Message, ...] = ()
    """From the assistant's first turn that is learned to its last; one turn where the prompt is plain text."""
    tokens: tuple[int, ...] = ()
    """[R] token ids, end tokens included; empty if there are messages."""
    environment_spans: tuple[tuple[int, int], ...] = ()
    """Of `tokens`, as in `Response`."""
    unlearned: tuple[int, ...] = ()
    """Indices in `messages` of turns of the assistant that are not learned, ascending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One item of a prompt set."""

    prompt_id: str
    """Stable name of the prompt, unique in its set; stored rollouts of one prompt share it."""
    text: str
    """The question as in its source, without template; for a conversation, the content of its last message."""
    answer: str
    """The reference answer that the reward compares with."""
    source: str
    """Where the prompt came from: `arithmetic`, `chains`, the name of a file, or a package with the arguments it
    was given."""
    messages: tuple[Message, ...] = ()
    """The conversation that the policy continues; empty for plain text."""
    tools: tuple[Message, ...] = ()
    """The functions that the policy may call, in addition to those of the run."""
    demonstration: Demonstration | None = None
    """The response to learn from, if the source holds one."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Prompt":
        """The inverse of `dataclasses.asdict`, after a way through JSON."""
        changed: dict[str, Any] = {name: tuple(values[name]) for name in ("messages", "tools")}
        if values["demonstration"] is not None:
            shown = {name: tuple(value) for name, value in values["demonstration"].items()}
            changed["demonstration"] = Demonstration(**shown)
        return cls(**{**values, **changed})


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn from the policy's logits."""

    temperature: float
    """Divides the logits; 0 means greedy decoding."""
    top_p: float
    """Nucleus mass in (0, 1]; 1 keeps the whole vocabulary."""
    top_k: int | None = None
    """Number of the likeliest tokens to sample from, before top-p; None keeps the whole vocabulary."""
    max_new_tokens: int
    """Longest response, tokens. The end-of-sequence token counts, and so do the tokens of an environment."""
    stop: tuple[str, ...] = ()
    """Texts that end a response."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response; (): those that the engine was started with."""

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary, which an engine then has to name."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One trajectory that an engine is asked for."""

    group_id: int
    """Number of its group. The response comes back under this and `sample_index`."""
    sample_index: int
    """Place in the group, 0 to group_size − 1."""
    prompt_tokens: tuple[int, ...]
    """[P] token ids."""
    seed: int
    """Of this trajectory alone, 63 bits."""
    source: str = DEFAULT_SOURCE
    """Name of the source in the config that its group belongs to."""
    prompt: Prompt | None = None
    """The prompt behind the tokens. Environments and stored trajectories need it; engines only read the tokens."""
    message_starts: tuple[tuple[str, int], ...] = ()
    """(role, index of its first token in the prompt) of each message, ascending, that of the assistant's turn to come
    included; empty if the prompt is plain text."""
    response_tokens: tuple[int, ...] = ()
    """Token ids of a response to continue. They count towards `max_new_tokens`."""
    t_admitted: float = 0.0
    """When its group was admitted under the staleness bound, unix seconds; 0 outside a generator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """An engine's result for one request: tokens and their probabilities under the behaviour policy μ."""

    tokens: tuple[int, ...]
    """[R] token ids, end-of-sequence tokens included, without the request's `response_tokens`."""
    rollout_logprobs: tuple[float, ...]
    """[R] log μ of each token after temperature and top-p, nats; 0 for tokens of an environment."""
    version_spans: tuple[tuple[int, int], ...]
    """(policy version, index of its first token), ascending in both."""
    finish_reason: FinishReason
    """`stop`: the policy or its environment ended it; `length`: it reached `max_new_tokens` or the limit of turns;
    `unfinished`: the engine was interrupted, and the response may be continued later. Such a one is never trained."""
    environment_spans: tuple[tuple[int, int], ...] = ()
    """(index of the first token, index after the last) of each run of tokens from an environment, ascending."""
    message_starts: tuple[tuple[str, int], ...] = ()
    """(role, index of its first token) of each message after the policy's first turn, ascending."""
    kept_tokens: tuple[int, ...] = ()
    """Token ids that truncated sampling could draw from, token by token; empty if nothing was truncated."""
    kept_counts: tuple[int, ...] = ()
    """[R] how many of `kept_tokens` belong to each token; empty if nothing was truncated."""
    routed_experts: bytes = b""
    """[P + G + R - 1, layers, experts per token] little-endian uint16: the experts that computed each token of the
    prompt, of the G given response tokens and of the response but the last; empty if they were not recorded."""
    environment_error: str | None = None
    """The exception of the environment that ended the response, in one line."""

    @property
    def loss_mask(self) -> list[int]:
        """[R] 1 for tokens of the policy, 0 for tokens of an environment."""
        mask = [1] * len(self.tokens)
        for start, end in self.environment_spans:
            mask[start:end] = [0] * (end - start)
        return mask

    @property
    def answer_tokens(self) -> tuple[int, ...]:
        """The tokens that the reward scores: those after the last token of an environment, or all of them."""
        return self.tokens[self.environment_spans[-1][1] :] if self.environment_spans else self.tokens

    def followed_by(self, rest: "Response") -> "Response":
        """This response and its continuation as one. The experts of `rest` are those of the whole text again."""
        first = len(self.tokens)
        version_spans = list(self.version_spans)
        for version, start in rest.version_spans:
            if not version_spans or version_spans[-1][0] != version:
                version_spans.append((version, first + start))
        kept_counts: tuple[int, ...] = ()
        if self.kept_counts or rest.kept_counts:
            # Tokens of an environment were drawn from nothing.
            kept_counts = tuple(n for part in (self, rest) for n in part.kept_counts or (0,) * len(part.tokens))
        return Response(
            tokens=self.tokens + rest.tokens,
            rollout_logprobs=self.rollout_logprobs + rest.rollout_logprobs,
            version_spans=tuple(version_spans),
            finish_reason=rest.finish_reason,
            environment_spans=(
                *self.environment_spans,
                *((first + start, first + end) for start, end in rest.environment_spans),
            ),
            message_starts=(*self.message_starts, *((role, first + start) for role, start in rest.message_starts)),
            kept_tokens=self.kept_tokens + rest.kept_tokens,
            kept_counts=kept_counts,
            routed_experts=self.routed_experts + rest.routed_experts[len(self.routed_experts) :],
            environment_error=rest.environment_error,
        )


NO_RESPONSE = Response(tokens=(), rollout_logprobs=(), version_spans=(), finish_reason="unfinished")
"""The response of a request before its first token is sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A request with its response."""

    request: Request
    response: Response
    t_started: float
    """When the engine got the request, unix seconds."""
    t_finished: float
    """When its last token was sampled, unix seconds."""
    t_environment: tuple[float, ...] = ()
    """[2 × turns] when its environment began and ended each answer, unix seconds, in turns."""

    @property
    def message_starts(self) -> list[tuple[str, int]]:
        """(role, index of its first token in prompt and response together) of each message, ascending."""
        first = len(self.request.prompt_tokens)
        return [*self.request.message_starts, *((role, first + at) for role, at in self.response.message_starts)]

    @property
    def prompt(self) -> Prompt:
        """The request's prompt, which every stored trajectory has."""
        assert self.request.prompt is not None
        return self.request.prompt
