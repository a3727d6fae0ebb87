"""Trajectories of several turns, as an engine over an engine: callers see one request and its whole response.

    submit ─► request ─► engine ─► one turn ─► environment.step ─► done, or too long, or too many turns ─► collect
                           ▲                         │ text or messages
                           └── all tokens so far ◄───┘

    text           turn ─► decoded text ─► Environment.step ─► text ─► tokens
    conversations  turn ─► renderer.parse ─► ChatEnvironment.step ─► messages ─► renderer.next_turn

The policy's tokens are kept as sampled and never tokenized again; the environment's answer becomes tokens separately
and is appended to them. Weights may be replaced at any time: each turn has its own version spans, and the tokens of an
environment belong to the current span. One trajectory may be at its third turn while another is at its first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from transformers import PreTrainedTokenizerBase

from configs.generation import GenerationConfig
from configs.prompts import PromptsConfig
from configs.schema import ModelConfig
from millrace.chat.base import ChatRenderer, Rendered
from millrace.chat.encoder import PromptEncoder, is_chat, load_encoder
from millrace.generation.engines.base import Engine, unstarted
from millrace.generation.environments.base import AnyEnvironment, ChatEnvironment, Environment
from millrace.prompts.dataset import PromptSet
from millrace.rollouts.groups_in_flight import derived_seed
from millrace.types import NO_RESPONSE, FinishReason, Prompt, Request, Response, Sampling, Trajectory
from millrace.weights.base import Weights

_LONGEST_ERROR = 300
"""Characters kept of an environment's exception, which is stored in the trajectory's row."""


class TextExchange:
    """Plays environments of text with a policy. A turn's text does not include a last token of `stop_token_ids`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int] = ()) -> None:
        """Without `stop_token_ids`, the tokenizer's end-of-sequence token is the only one."""
        self._tokenizer = tokenizer
        self._ends = frozenset(stop_token_ids or [tokenizer.eos_token_id])

    def answer(
        self, environment: AnyEnvironment, prompt: Prompt, context: Sequence[int], turn: Sequence[int]
    ) -> Rendered | None:
        """Returns the tokens after the policy's `turn`; None if it was the last. Raises what the environment raises."""
        sampled = turn[:-1] if turn[-1] in self._ends else turn
        text = self._tokenizer.decode(list(sampled), clean_up_tokenization_spaces=False)
        observation = cast(Environment, environment).step(str(text))
        if observation.done:
            return None
        return Rendered(tuple(self._tokenizer(observation.text, add_special_tokens=False)["input_ids"]))


class ChatExchange:
    """Plays environments of conversations with a policy, in the template of `encoder`, which has a renderer."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._renderer = cast(ChatRenderer, encoder.renderer)

    def answer(
        self, environment: AnyEnvironment, prompt: Prompt, context: Sequence[int], turn: Sequence[int]
    ) -> Rendered | None:
        """Like `TextExchange.answer`; also raises ChatError if nothing can follow that turn."""
        tools = self._encoder.tools_of(prompt)
        observation = cast(ChatEnvironment, environment).step(self._renderer.parse(turn, context, tools))
        return None if observation.done else self._renderer.next_turn(context, turn, observation.messages, tools)


def sampling_of(generation: GenerationConfig) -> Sampling:
    """The sampling of a run, in training and evaluation alike."""
    return Sampling(
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        max_new_tokens=generation.max_new_tokens,
    )


def prompt_encoder(
    folder: Path,
    model: ModelConfig,
    prompts: PromptsConfig,
    asked: PromptSet,
    environment: type[AnyEnvironment] | None,
) -> PromptEncoder:
    """The encoder of a run's prompts for the model in `folder`.

    The run is chat if its prompts `asked` are, or if its environment converses. Raises InputError as `is_chat` and
    `load_encoder` do.
    """
    if environment is not None and issubclass(environment, ChatEnvironment):
        return load_encoder(folder, model, prompts, environment.tools, chat=True)
    return load_encoder(folder, model, prompts, (), chat=is_chat(prompts, (*asked.train, *asked.eval)))


@dataclass(kw_only=True)
class _Episode:
    """A trajectory in flight."""

    request: Request
    prompt: Prompt
    sampling: Sampling
    environment: AnyEnvironment | None = None
    num_turns: int = 0
    t_started: float = 0.0
    response: Response = NO_RESPONSE
    """All turns and answers so far."""

    @property
    def room(self) -> int:
        """How many more tokens fit."""
        return self.sampling.max_new_tokens - len(self.response.tokens)

    def add_turn(self, turn: Trajectory) -> None:
        """Appends the policy's tokens."""
        if not self.num_turns:
            self.t_started = turn.t_started
        self.num_turns += 1
        self.response = self.response.followed_by(turn.response)

    def add_answer(self, answer: Rendered) -> None:
        """Appends as many of the environment's tokens as fit."""
        tokens = tuple(answer.tokens[: self.room])
        if not tokens:
            return
        whole = len(tokens) == len(answer.tokens)
        self.response = self.response.followed_by(
            Response(
                tokens=tokens,
                rollout_logprobs=(0.0,) * len(tokens),
                version_spans=(),
                finish_reason="unfinished",
                environment_spans=((0, len(tokens)),),
                message_starts=tuple((role, at) for role, at in answer.message_starts if at < len(tokens) or whole),
            )
        )

    def trajectory(self, t_finished: float, finish_reason: FinishReason, error: str | None) -> Trajectory:
        response = replace(
            self.response,
            finish_reason=finish_reason,
            routed_experts=self._padded_experts(),
            environment_error=error,
        )
        return Trajectory(request=self.request, response=response, t_started=self.t_started, t_finished=t_finished)

    def _padded_experts(self) -> bytes:
        """Returns the experts of each token but the last. None has computed an environment's tokens at the end."""
        response = self.response
        start, end = response.environment_spans[-1] if response.environment_spans else (0, 0)
        missing = end - start if end == len(response.tokens) else 0
        num_routed = len(self.request.prompt_tokens) + len(response.tokens) - 1 - missing
        # All bits set: NOT_RECORDED.
        return response.routed_experts + b"\xff" * (missing * (len(response.routed_experts) // num_routed))


def in_environment(
    make_engine: Callable[[Sequence[str]], Engine],
    environment: type[AnyEnvironment] | None,
    encoder: PromptEncoder,
    *,
    max_turns: int,
    each_turn: Callable[[], None] = lambda: None,
) -> Engine:
    """The engine from `make_engine(stop texts)`, playing `environment` if there is one."""
    if environment is None:
        return make_engine(())
    exchange: TextExchange | ChatExchange = TextExchange(encoder.tokenizer, encoder.stop_token_ids)
    if issubclass(environment, ChatEnvironment):
        exchange = ChatExchange(encoder)
    return Episodes(make_engine(environment.stop), environment, exchange, max_turns=max_turns, each_turn=each_turn)


class Episodes(Engine):
    """Plays an environment with an engine, which must also end responses at the environment's stop texts.

    Each trajectory has its own object from `environment()` and at most `max_turns` turns of the policy. All its tokens
    share `max_new_tokens`. An observation after the last turn is not appended: the policy would not read it.
    `each_turn` is called after every turn of the policy.
    """

    def __init__(
        self,
        engine: Engine,
        environment: Callable[[], AnyEnvironment],
        exchange: TextExchange | ChatExchange,
        *,
        max_turns: int,
        each_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy_version = engine.policy_version
        self.vocab_size = engine.vocab_size
        self._engine = engine
        self._environment = environment
        self._exchange = exchange
        self._max_turns = max_turns
        self._each_turn = each_turn
        # By (group, place in the group).
        self._episodes: dict[tuple[int, int], _Episode] = {}

    @property
    def in_flight(self) -> int:
        return len(self._episodes)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        for request in requests:
            if request.prompt is None:
                raise ValueError("an environment needs the prompt, and the request has none")
            episode = _Episode(request=request, prompt=request.prompt, sampling=sampling)
            self._episodes[request.group_id, request.sample_index] = episode
        self._engine.submit(requests, sampling)

    def collect(self, seconds: float) -> list[Trajectory]:
        finished = []
        for turn in self._engine.collect(seconds):
            key = turn.request.group_id, turn.request.sample_index
            episode = self._episodes[key]
            episode.add_turn(turn)
            self._each_turn()
            ended = self._answer(episode, turn.response)
            if ended is None:
                # With its own seed; otherwise all turns would draw alike.
                seed = derived_seed(episode.request.seed, episode.num_turns)
                following = replace(episode.request, response_tokens=episode.response.tokens, seed=seed)
                self._engine.submit([following], episode.sampling)
            else:
                del self._episodes[key]
                finished.append(episode.trajectory(turn.t_finished, *ended))
        return finished

    @property
    def tokens_in_flight(self) -> int:
        return self._engine.tokens_in_flight + sum(len(episode.response.tokens) for episode in self._episodes.values())

    def abort(self) -> None:
        self._engine.abort()
        self._episodes.clear()

    def interrupt(self) -> list[Trajectory]:
        # The state of an environment can't be stored, so its trajectories begin again.
        requests = [episode.request for episode in self._episodes.values()]
        self.abort()
        return [unstarted(request) for request in requests]

    def update_weights(self, weights: Weights) -> float:
        pause_seconds = self._engine.update_weights(weights)
        self.policy_version = self._engine.policy_version
        return pause_seconds

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        return self._engine.next_logprobs(tokens, most)

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def close(self) -> None:
        self._engine.close()

    def _answer(self, episode: _Episode, turn: Response) -> tuple[FinishReason, str | None] | None:
        """(finish reason, error) if this turn ends the trajectory. Otherwise appends the environment's answer."""
        if turn.finish_reason == "length":
            return "length", None
        try:
            if episode.environment is None:
                # Not earlier: then an exception in here could end a response without tokens.
                episode.environment = self._environment()
                episode.environment.reset(episode.prompt, episode.request.seed)
            said = episode.response.tokens
            context = [*episode.request.prompt_tokens, *said[: len(said) - len(turn.tokens)]]
            answer = self._exchange.answer(episode.environment, episode.prompt, context, turn.tokens)
        except Exception as error:  # noqa: BLE001 — a failed trajectory is data, stored with its reason
            line = " ".join(f"{type(error).__name__}: {error}".split())
            return "stop", line[:_LONGEST_ERROR]
        if answer is None:
            return "stop", None
        if episode.num_turns == self._max_turns:
            return "length", None
        episode.add_answer(answer)
        return None if episode.room else ("length", None)
