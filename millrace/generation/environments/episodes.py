"""Trajectories of one turn or several, as an engine over an engine: callers see one request and its whole response.

    submit ─► request ─► engine ─► one turn ─► environment.step ─► done, or too long, or too many turns ─► collect
                           ▲                         │ text or messages
                           └── all tokens so far ◄───┘

    text           turn ─► decoded text ─► Environment.step ─► text ─► tokens
    conversations  turn ─► renderer.parse ─► ChatEnvironment.step ─► messages ─► renderer.next_turn
    neither        one turn is the whole response
    demonstration  the prompt's own response is the whole one; the engine computes nothing

The request's source determines the kind of episode. A demonstration counts as sampled by a policy with a single
possible response: log μ is 0 at each token. It has the version of the engine's weights, so that streams, staleness and
rollbacks work as for sampled responses.

The policy's tokens are kept as sampled and never tokenized again; the environment's answer becomes tokens separately
and is appended to them. Weights may be replaced at any time: each turn has its own version spans, and the tokens of an
environment belong to the current span. One trajectory may be at its third turn while another is at its first.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from configs.generation import GenerationConfig
from configs.schema import ModelConfig
from configs.task import EnvironmentConfig, PromptsConfig
from millrace.chat.base import Rendered
from millrace.chat.encoder import PromptEncoder, is_chat, load_encoder
from millrace.errors import PromptsError, one_line
from millrace.generation.engines.base import Engine, unstarted
from millrace.generation.environments.base import AnyEnvironment, ChatEnvironment, Environment, environment_class
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


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRules:
    """How the requests of a source are played."""

    encoder: PromptEncoder
    environment: type[AnyEnvironment] | None = None
    """None: the policy's first turn is the whole response."""
    max_turns: int = 1
    """Turns of the policy at most, in an environment."""
    demonstrates: bool = False
    """Whether requests are answered with the demonstration of their prompt."""

    def sampling_of_turns(self, sampling: Sampling) -> Sampling:
        """The sampling of one turn, with what ends it."""
        stop = () if self.environment is None else self.environment.stop
        return replace(sampling, stop=stop, stop_token_ids=self.encoder.stop_token_ids)


def load_rules(
    folder: Path, model: ModelConfig, prompts: PromptsConfig, environment: EnvironmentConfig, prompt_set: PromptSet
) -> EpisodeRules:
    """The rules of a source with these settings and prompts, for the model in `folder`.

    Raises InputError as `environment_class` and `prompt_encoder` do.
    """
    played = environment_class(environment.name)
    encoder = prompt_encoder(folder, model, prompts, prompt_set, played)
    return EpisodeRules(encoder=encoder, environment=played, max_turns=environment.max_turns)


@dataclass(kw_only=True)
class _Episode:
    """A trajectory in flight."""

    request: Request
    rules: EpisodeRules
    sampling: Sampling
    """Of its turns."""
    environment: AnyEnvironment | None = None
    num_turns: int = 0
    t_started: float = 0.0
    response: Response = NO_RESPONSE
    """All turns and answers so far."""
    t_environment: list[float] = field(default_factory=list)
    """When its environment began and ended each answer, unix seconds."""


class Episodes(Engine):
    """Plays requests with an engine, each by the rules of its source.

    Each trajectory has its own object of an environment. All its tokens share `max_new_tokens`. An answer that the
    policy could not read, because that was its last turn or no token is left for the next, is not appended.
    `each_turn` is called after every turn of the policy.
    """

    def __init__(
        self,
        engine: Engine,
        rules: Mapping[str, EpisodeRules],
        each_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy_version = engine.policy_version
        self.vocab_size = engine.vocab_size
        self._engine = engine
        self._rules = rules
        self._each_turn = each_turn
        # By (group, place in the group).
        self._episodes: dict[tuple[int, int], _Episode] = {}
        self._demonstrations: list[Trajectory] = []

    @property
    def in_flight(self) -> int:
        return len(self._episodes) + len(self._demonstrations)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Raises PromptsError for a demonstration that is longer than `max_new_tokens`."""
        for source, group in groupby(requests, key=lambda request: request.source):
            of_source, rules = list(group), self._rules[source]
            if rules.demonstrates:
                self._demonstrations += [self._demonstrated(request, rules, sampling) for request in of_source]
                continue
            of_turns = rules.sampling_of_turns(sampling)
            for request in of_source:
                if request.prompt is None and rules.environment is not None:
                    raise ValueError("an environment needs the prompt, and the request has none")
                episode = _Episode(request=request, rules=rules, sampling=of_turns)
                self._episodes[_place(request)] = episode
            self._engine.submit(of_source, of_turns)

    def collect(self, seconds: float) -> list[Trajectory]:
        finished = self._take_demonstrations()
        for turn in self._engine.collect(0 if finished else seconds):
            episode = self._episodes[_place(turn.request)]
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
                del self._episodes[_place(turn.request)]
                finish_reason, error = ended
                response = replace(episode.response, finish_reason=finish_reason, environment_error=error)
                finished.append(
                    replace(
                        turn,
                        request=episode.request,
                        response=response,
                        t_started=episode.t_started,
                        t_environment=tuple(episode.t_environment),
                    )
                )
        return finished

    @property
    def tokens_in_flight(self) -> int:
        return self._engine.tokens_in_flight + sum(len(episode.response.tokens) for episode in self._episodes.values())

    def interrupt(self) -> list[Trajectory]:
        interrupted = self._take_demonstrations()
        for turn in self._engine.interrupt():
            episode = self._episodes.pop(_place(turn.request))
            # The state of an environment can't be stored, so its trajectories begin again.
            interrupted.append(turn if episode.rules.environment is None else unstarted(episode.request))
        return interrupted

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

    def _demonstrated(self, request: Request, rules: EpisodeRules, sampling: Sampling) -> Trajectory:
        assert request.prompt is not None
        response = rules.encoder.demonstrate(request.prompt)
        check_demonstration(request.prompt.prompt_id, len(response.tokens), sampling.max_new_tokens)
        response = replace(response, version_spans=((self.policy_version, 0),))
        now = time.time()
        return Trajectory(request=request, response=response, t_started=now, t_finished=now)

    def _take_demonstrations(self) -> list[Trajectory]:
        taken, self._demonstrations = self._demonstrations, []
        return taken

    def _answer(self, episode: _Episode, turn: Response) -> tuple[FinishReason, str | None] | None:
        """(finish reason, error) if this turn ends the trajectory. Otherwise appends the environment's answer."""
        rules, prompt = episode.rules, episode.request.prompt
        if rules.environment is None or turn.finish_reason == "length":
            return turn.finish_reason, None
        assert prompt is not None
        begun = time.time()
        try:
            if episode.environment is None:
                # Not earlier: then an exception in here could end a response without tokens.
                episode.environment = rules.environment()
                episode.environment.reset(prompt, episode.request.seed)
            answer = _play(episode, episode.environment, prompt, turn.tokens)
        except Exception as error:  # noqa: BLE001 — a failed trajectory is data, stored with its reason
            return "stop", f"{type(error).__name__}: {one_line(error)}"[:_LONGEST_ERROR]
        finally:
            episode.t_environment += begun, time.time()
        if answer is None:
            return "stop", None
        room = episode.sampling.max_new_tokens - len(episode.response.tokens)
        if episode.num_turns == rules.max_turns or len(answer.tokens) >= room:
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


def check_demonstration(prompt_id: str, num_tokens: int, max_new_tokens: int) -> None:
    """Raises PromptsError if a demonstration of `num_tokens` is too long."""
    if num_tokens > max_new_tokens:
        read = f"its demonstration has {num_tokens} tokens and generation.max_new_tokens is {max_new_tokens}"
        raise PromptsError(read, file=f"prompt {prompt_id}", expected=f"at least {num_tokens} there")


def _place(request: Request) -> tuple[int, int]:
    return request.group_id, request.sample_index


def _play(episode: _Episode, environment: AnyEnvironment, prompt: Prompt, turn: Sequence[int]) -> Rendered | None:
    """Returns the environment's tokens after the policy's `turn`; None if that was the last turn.

    Raises whatever the environment raises, and ChatError if nothing can follow that turn.
    """
    encoder = episode.rules.encoder
    if isinstance(environment, ChatEnvironment):
        renderer, tools = encoder.renderer, encoder.tools_of(prompt)
        assert renderer is not None, "a conversation has a renderer"
        text = (*episode.request.prompt_tokens, *episode.response.tokens)
        context = text[: len(text) - len(turn)]
        observation = environment.step(renderer.parse(turn, context, tools))
        if observation.done:
            return None
        encoder.refuse_marks(observation.messages)
        return renderer.next_turn(context, turn, observation.messages, tools)
    assert isinstance(environment, Environment)
    sampled = turn[:-1] if turn[-1] in encoder.stop_token_ids else turn
    observation = environment.step(str(encoder.tokenizer.decode(list(sampled), clean_up_tokenization_spaces=False)))
    if observation.done:
        return None
    return Rendered(tuple(encoder.tokenizer(observation.text, add_special_tokens=False)["input_ids"]))
