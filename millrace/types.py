"""The nouns of Millrace: what stages hand to each other, with every field's unit, shape and whose policy it speaks of.

Shapes: P prompt tokens, R response tokens of one trajectory, those of its environment included. Log-probabilities are
natural logarithms (nats), float32.
"""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One item of a prompt set."""

    prompt_id: str
    """Stable name of the prompt, unique in its set."""
    text: str
    """What the policy reads, before tokenisation."""
    answer: str
    """What the verifier compares with."""
    source: str
    """Where the prompt came from: `arithmetic` or the name of its file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn from the policy's logits."""

    temperature: float
    """Divides the logits; 0 means greedy decoding."""
    top_p: float
    """Nucleus mass in (0, 1]; 1 keeps the whole vocabulary."""
    max_new_tokens: int
    """Longest response, tokens; the end-of-sequence token counts, and so does all that an environment writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One trajectory that an engine is asked for."""

    group_id: int
    """Its group; with `sample_index` the name by which the response comes back."""
    sample_index: int
    """Place in the group, 0 to group_size − 1."""
    prompt_tokens: tuple[int, ...]
    """[P] token ids."""
    seed: int
    """Of this trajectory alone, 63 bits."""
    prompt: Prompt | None = None
    """What is asked, for an environment to begin with; engines know its tokens alone."""
    response_tokens: tuple[int, ...] = ()
    """The response so far, token ids, where it is to go on: they count for `max_new_tokens`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """What an engine returns for one request: tokens and the behaviour policy μ that drew them."""

    tokens: tuple[int, ...]
    """[R] token ids, end-of-sequence tokens included; without those that the request came with."""
    rollout_logprobs: tuple[float, ...]
    """[R] log μ of each token after temperature and top-p, nats; 0 for what an environment wrote."""
    version_spans: tuple[tuple[int, int], ...]
    """(policy version, index of its first token), ascending in both."""
    finish_reason: FinishReason
    """`stop`: the policy or its environment ended it; `length`: `max_new_tokens` did, or the limit of turns."""
    environment_spans: tuple[tuple[int, int], ...] = ()
    """(index of the first token, index behind the last) of each run of tokens that an environment wrote, ascending."""
    environment_error: str | None = None
    """What the environment raised, in one line, where that ended the response."""

    @property
    def loss_mask(self) -> list[int]:
        """[R] 1 where the policy drew the token, 0 where an environment wrote it."""
        mask = [1] * len(self.tokens)
        for start, end in self.environment_spans:
            mask[start:end] = [0] * (end - start)
        return mask

    @property
    def answer_tokens(self) -> tuple[int, ...]:
        """What is judged: the policy's last words, behind all that an environment wrote. All of it where none did."""
        return self.tokens[self.environment_spans[-1][1] :] if self.environment_spans else self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """A request with its response."""

    request: Request
    response: Response
    t_started: float
    """When the engine got the request, unix seconds."""
    t_finished: float
    """When its last token was sampled, unix seconds."""
