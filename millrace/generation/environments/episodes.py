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

from configs.generation import GenerationConfig
from configs.prompts import PromptsConfig
from configs.schema import ModelConfig
from millrace.chat.base import Rendered
from millrace.chat.encoder import PromptEncoder, is_chat, load_encoder
from millrace.generation.engines.base import Engine, unstarted
from millrace.generation.environments.base import AnyEnvironment, ChatEnvironment, Environment
from millrace.prompts.dataset import PromptSet
from millrace.rollouts.groups_in_flight import derived_seed
from millrace.types import NO_RESPONSE, FinishReason, Prompt, Request, Response, Sampling, Trajectory
from millrace.weights.base import Weights

_LONGEST_ERROR = 300
"""Characters kept of an environment's exception, which is stored in the trajectory's row."""


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
    prompt_set: PromptSet,
    environment: type[AnyEnvironment] | None,
) -> PromptEncoder:
    """The encoder of a run's prompts for the model in `folder`.

    The run is chat if its prompts are, or if its environment converses. Raises InputError as `is_chat` and
    `load_encoder` do.
    """
    if environment is not None and issubclass(environment, ChatEnvironment):
        return load_encoder(folder, model, prompts, environment.tools, chat=True)
    return load_encoder(folder, model, prompts, (), chat=is_chat(prompts, (*prompt_set.train, *prompt_set.eval)))


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
    return Episodes(make_engine(environment.stop), environment, encoder, max_turns=max_turns, each_turn=each_turn)


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


class Episodes(Engine):
    """Plays an environment with an engine, which must also end responses at the environment's stop texts.

    Each trajectory has its own object from `environment()` and at most `max_turns` turns of the policy. All its tokens
    share `max_new_tokens`. An answer that the policy could not read, because that was its last turn or no token is left
    for the next, is not appended. `each_turn` is called after every turn of the policy.
    """

    def __init__(
        self,
        engine: Engine,
        environment: Callable[[], AnyEnvironment],
        encoder: PromptEncoder,
        *,
        max_turns: int,
        each_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy_version = engine.policy_version
        self.vocab_size = engine.vocab_size
        self._engine = engine
        self._environment = environment
        self._encoder = encoder
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
            episode.t_started = episode.t_started or turn.t_started
            episode.num_turns += 1
            episode.response = episode.response.followed_by(turn.response)
            self._each_turn()
            ended = self._answer(episode, turn.response)
            if ended is None:
                # With its own seed; otherwise all turns would draw alike.
                seed = derived_seed(episode.request.seed, episode.num_turns)
                following = replace(episode.request, response_tokens=episode.response.tokens, seed=seed)
                self._engine.submit([following], episode.sampling)
            else:
                del self._episodes[key]
                finish_reason, error = ended
                response = replace(episode.response, finish_reason=finish_reason, environment_error=error)
                finished.append(replace(turn, request=episode.request, response=response, t_started=episode.t_started))
        return finished

    @property
    def tokens_in_flight(self) -> int:
        return self._engine.tokens_in_flight + sum(len(episode.response.tokens) for episode in self._episodes.values())

    def interrupt(self) -> list[Trajectory]:
        # The state of an environment can't be stored, so its trajectories begin again.
        requests = [episode.request for episode in self._episodes.values()]
        self._episodes.clear()
        self._engine.abort()
        return [unstarted(request) for request in requests]

    @property
    def accepts_weights(self) -> bool:
        return self._engine.accepts_weights

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
            answer = self._play(episode.environment, episode, turn.tokens)
        except Exception as error:  # noqa: BLE001 — a failed trajectory is data, stored with its reason
            line = " ".join(f"{type(error).__name__}: {error}".split())
            return "stop", line[:_LONGEST_ERROR]
        if answer is None:
            return "stop", None
        room = episode.sampling.max_new_tokens - len(episode.response.tokens)
        if episode.num_turns == self._max_turns or len(answer.tokens) >= room:
            return "length", None
        if answer.tokens:
            episode.response = episode.response.followed_by(
                Response(
                    tokens=answer.tokens,
                    rollout_logprobs=(0.0,) * len(answer.tokens),
                    version_spans=(),
                    finish_reason="unfinished",
                    environment_spans=((0, len(answer.tokens)),),
                    message_starts=answer.message_starts,
                )
            )
        return None

    def _play(self, environment: AnyEnvironment, episode: _Episode, turn: Sequence[int]) -> Rendered | None:
        """Returns the environment's tokens after the policy's `turn`; None if that was the last turn.

        Raises whatever the environment raises, and ChatError if nothing can follow that turn.
        """
        if isinstance(environment, ChatEnvironment):
            renderer, tools = self._encoder.renderer, self._encoder.tools_of(episode.prompt)
            assert renderer is not None, "a conversation has a renderer"
            text = (*episode.request.prompt_tokens, *episode.response.tokens)
            context = text[: len(text) - len(turn)]
            observation = environment.step(renderer.parse(turn, context, tools))
            return None if observation.done else renderer.next_turn(context, turn, observation.messages, tools)
        assert isinstance(environment, Environment)
        tokenizer = self._encoder.tokenizer
        sampled = turn[:-1] if turn[-1] in self._encoder.stop_token_ids else turn
        observation = environment.step(str(tokenizer.decode(list(sampled), clean_up_tokenization_spaces=False)))
        if observation.done:
            return None
        return Rendered(tuple(tokenizer(observation.text, add_special_tokens=False)["input_ids"]))
