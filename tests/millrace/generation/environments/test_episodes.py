"""Rollouts of several turns: tokens of the policy and of its environment are distinguished."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.policies import all_of
from support.engines.scripted_engine import LOGPROB, Counting, ScriptedEngine
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from configs.stored import DEFAULT_SOURCE
from configs.task import PromptsConfig
from millrace.chat.encoder import PromptEncoder
from millrace.generation.engines.base import unstarted
from millrace.generation.environments.base import Environment, Observation
from millrace.generation.environments.calculator import Calculator
from millrace.generation.environments.episodes import EpisodeRules, Episodes
from millrace.rollouts.groups_in_flight import derived_seed
from millrace.types import Prompt, Request, Response, Sampling, Trajectory
from millrace.weights.base import Manifest, Weights, WeightsId

ROOMY = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=100)


def prompt(text: str = "12+34=") -> Prompt:
    return Prompt(prompt_id="p", text=text, answer="46", source="test")


def request(group_id: int = 0, sample_index: int = 0) -> Request:
    return Request(
        group_id=group_id, sample_index=sample_index, prompt_tokens=(1, 2), seed=41 + sample_index, prompt=prompt()
    )


def weights(version: int) -> Weights:
    weights_id = WeightsId(incarnation=0, policy_version=version, t_offered=time.time())
    return Weights(manifest=Manifest(id=weights_id), tensors={"w": torch.zeros(1)})


class Told(Environment):
    """Answers each turn with the next of `answers`; where that is an error, it is raised."""

    answers: Sequence[object] = ()

    def reset(self, prompt: Prompt, seed: int) -> None:
        self.left = list(self.answers)

    def step(self, text: str) -> Observation:
        answer = self.left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]


def answering(*answers: object) -> type[Told]:
    return type("Told", (Told,), {"answers": answers})


def by_turn(*turns: str) -> Callable[[Request], str]:
    """A policy that says these one after the other: which is next shows in how often it was answered."""
    said: dict[tuple[int, int], int] = {}

    def says(request: Request) -> str:
        name = request.group_id, request.sample_index
        said[name] = said.get(name, -1) + 1
        return turns[said[name]]

    return says


def episodes_of(
    engine: ScriptedEngine, environment: type[Environment] = Calculator, max_turns: int = 9, **options: Any
) -> Episodes:
    """One source in the environment, another, `plain`, without."""
    encoder = PromptEncoder(engine.tokenizer, PromptsConfig())
    rules = EpisodeRules(encoder=encoder, environment=environment, max_turns=max_turns)
    return Episodes(engine, {DEFAULT_SOURCE: rules, "plain": EpisodeRules(encoder=encoder)}, **options)


def played(
    tokenizer: PreTrainedTokenizerFast,
    environment: type[Environment],
    *turns: str,
    sampling: Sampling = ROOMY,
    max_turns: int = 9,
) -> Response:
    episodes = episodes_of(ScriptedEngine(tokenizer, by_turn(*turns)), environment, max_turns)
    episodes.submit([request()], sampling)
    (done,) = all_of(episodes)
    assert done.request == request()
    return done.response


def written(tokenizer: PreTrainedTokenizerFast, response: Response) -> str:
    """The response, with the environment's text in brackets."""
    texts, inside = "", False
    for token, mask in zip(response.tokens, response.loss_mask, strict=True):
        texts += "" if inside == (not mask) else ("]" if mask else "[")
        inside = not mask
        texts += tokenizer.decode([token])
    return texts + "]" * inside


def test_turns_and_answers_are_in_order_and_only_turns_are_learnt(calculating: PreTrainedTokenizerFast) -> None:
    response = played(calculating, Calculator, "<12+34>", "<1*2>", "46$")
    assert written(calculating, response) == "<12+34>[46|]<1*2>[2|]46<eos>"
    assert response.rollout_logprobs == tuple(LOGPROB * mask for mask in response.loss_mask)
    assert response.environment_spans == ((7, 10), (15, 17))
    assert response.finish_reason == "stop"
    assert response.environment_error is None
    assert calculating.decode(response.answer_tokens) == "46<eos>"


def test_a_truncated_trajectory_has_kept_tokens_for_turns_and_none_for_answers(
    calculating: PreTrainedTokenizerFast,
) -> None:
    assert played(calculating, Calculator, "<12+34>", "46$").kept_counts == ()
    response = played(calculating, Calculator, "<12+34>", "<1*2>", "46$", sampling=replace(ROOMY, top_p=0.9))
    assert response.kept_counts == tuple(response.loss_mask)
    said = [token for token, mask in zip(response.tokens, response.loss_mask, strict=True) if mask]
    assert list(response.kept_tokens) == said


class RecordingEngine(ScriptedEngine):
    """One layer and one expert per token: the number of tokens that were there before this turn."""

    def collect(self, seconds: float) -> list[Trajectory]:
        return [self._recorded(done) for done in super().collect(seconds)]

    def _recorded(self, done: Trajectory) -> Trajectory:
        previous = len(done.request.prompt_tokens) + len(done.request.response_tokens)
        experts = previous.to_bytes(2, "little") * (previous + len(done.response.tokens) - 1)
        return replace(done, response=replace(done.response, routed_experts=experts))


def test_a_trajectory_keeps_the_experts_that_first_computed_each_token(calculating: PreTrainedTokenizerFast) -> None:
    episodes = episodes_of(RecordingEngine(calculating, by_turn("<12+34>", "46$")))
    episodes.submit([request()], ROOMY)
    (done,) = all_of(episodes)
    experts = np.frombuffer(done.response.routed_experts, "<u2").tolist()
    num_first = len(done.request.prompt_tokens) + 7 - 1
    assert experts == [2] * num_first + [9 + 3] * (len(done.response.tokens) - 7)


def test_each_turn_keeps_its_versions_and_an_answer_has_the_current_one(
    calculating: PreTrainedTokenizerFast,
) -> None:
    engine = ScriptedEngine(calculating, by_turn("<1+1>", "<2+2>", "<3+3>", "6$"))
    episodes = episodes_of(engine)
    episodes.update_weights(weights(3))
    episodes.submit([request()], ROOMY)
    done: list[Trajectory] = []
    for version in (3, 5, 5, 8):
        assert episodes.update_weights(weights(version)) == 0.25
        assert episodes.policy_version == version
        done += episodes.collect(0.0)
    (trajectory,) = done
    assert written(calculating, trajectory.response) == "<1+1>[2|]<2+2>[4|]<3+3>[6|]6<eos>"
    assert trajectory.response.version_spans == ((3, 0), (5, 7), (8, 21))


def test_what_the_policy_drew_is_never_tokenised_again() -> None:
    vocabulary = {"<eos>": 0, "1": 1, "2": 2, "12": 3, "=": 4}
    merging = Tokenizer(models.BPE(vocabulary, [("1", "2")]))
    merging.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merging, eos_token="<eos>")
    assert tokenizer("12")["input_ids"] == [3]
    engine = ScriptedEngine(tokenizer, by_turn("12=", "12$"))
    episodes = episodes_of(engine, answering(Observation(text="12"), Observation(done=True)))
    episodes.submit([request()], ROOMY)
    (done,) = all_of(episodes)
    assert done.response.tokens == (1, 2, 4, 3, 1, 2, 0)
    assert engine.asked[1].response_tokens == (1, 2, 4, 3)


def test_every_turn_has_its_own_seed_and_the_first_the_trajectorys(
    calculating: PreTrainedTokenizerFast,
) -> None:
    engine = ScriptedEngine(calculating, by_turn("<1>", "<2>", "3$"))
    episodes = episodes_of(engine)
    episodes.submit([request(0, 0), request(0, 1)], ROOMY)
    all_of(episodes)
    seeds = [request.seed for request in engine.asked]
    assert seeds[:2] == [41, 42]
    assert sorted(seeds[2:]) == sorted(derived_seed(seed, turn) for seed in (41, 42) for turn in (1, 2))
    assert len(set(seeds)) == 6
    # Replays of stored runs depend on it.
    assert derived_seed(0, 1) == 8613600020916457518


def test_an_environment_gets_prompt_seed_and_turns_without_end_tokens(
    calculating: PreTrainedTokenizerFast,
) -> None:
    made: list[Counting] = []

    class Made(Counting):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    engine = ScriptedEngine(calculating, by_turn("1=", "2$", "3="))
    episodes = episodes_of(engine, Made, max_turns=3)
    episodes.submit([request(0, 0), request(4, 1)], ROOMY)
    first, second = all_of(episodes)
    assert [environment.told for environment in made] == [
        [(prompt(), 41), "1=", "2", "3="],
        [(prompt(), 42), "1=", "2", "3="],
    ]
    assert (first.request, second.request) == (request(0, 0), request(4, 1))
    assert written(calculating, first.response) == "1=[1+]2<eos>[2+]3="


@pytest.mark.parametrize(
    ("environment", "turns", "expected", "finish_reason"),
    [
        # One turn is as without an environment.
        (Calculator, ("46$",), "46<eos>", "stop"),
        # After the last turn allowed, the answer is left out.
        (Calculator, ("<1>", "<2>", "<3>"), "<1>[1|]<2>", "length"),
        # And so is the text that comes with the end.
        (answering(Observation(text="1|"), Observation(text="2|", done=True)), ("<1>", "<2>"), "<1>[1|]<2>", "stop"),
        # An environment may have nothing to say.
        (answering(Observation(), Observation(done=True)), ("<1>", "2$"), "<1>2<eos>", "stop"),
    ],
)
def test_an_episode_ends_with_its_environment_or_its_last_turn(
    calculating: PreTrainedTokenizerFast,
    environment: type[Environment],
    turns: Sequence[str],
    expected: str,
    finish_reason: str,
) -> None:
    response = played(calculating, environment, *turns, max_turns=2)
    assert written(calculating, response) == expected
    assert response.finish_reason == finish_reason
    if not response.environment_spans:
        assert response.answer_tokens == response.tokens


@pytest.mark.parametrize(
    ("max_new_tokens", "expected", "finish_reason"),
    [
        (3, "<99", "length"),
        (4, "<99>", "length"),
        # An answer that leaves no room for a turn is left out.
        (6, "<99>", "length"),
        (7, "<99>", "length"),
        (8, "<99>[99|]9", "length"),
        (10, "<99>[99|]99<eos>", "stop"),
    ],
)
def test_turns_and_answers_share_one_budget_wherever_that_ends(
    calculating: PreTrainedTokenizerFast, max_new_tokens: int, expected: str, finish_reason: str
) -> None:
    sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=max_new_tokens)
    response = played(calculating, Calculator, "<99>", "99$", sampling=sampling)
    assert written(calculating, response) == expected
    assert len(response.tokens) == len(response.rollout_logprobs) <= max_new_tokens
    assert response.finish_reason == finish_reason


def test_an_environment_does_not_get_a_turn_that_was_cut_short(calculating: PreTrainedTokenizerFast) -> None:
    sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=2)
    response = played(calculating, answering(ValueError("told")), "<1>", sampling=sampling)
    assert (response.finish_reason, response.environment_error) == ("length", None)


class WithoutStart(Told):
    """Can't even begin."""

    def reset(self, prompt: Prompt, seed: int) -> None:
        raise OSError(f"no {prompt.prompt_id}")


class Unmade(Told):
    """Can't be made."""

    def __init__(self) -> None:
        raise ImportError("a tool is missing")


@pytest.mark.parametrize(
    ("environment", "said", "expected"),
    [
        (answering(Observation(text="1|"), RuntimeError("broken\n pipe")), "RuntimeError: broken pipe", "<1>[1|]<2>"),
        (answering(Observation(text="1|"), "2|"), "AttributeError: 'str' object has no", "<1>[1|]<2>"),
        (answering(Observation(text=b"1|")), "", "<1>"),
        (answering(Observation(text="\ud800")), "", "<1>"),
        (WithoutStart, "OSError: no p", "<1>"),
        (Unmade, "ImportError: a tool is missing", "<1>"),
        (answering(ValueError("x" * 5000)), "ValueError: xxx", "<1>"),
        (answering(ValueError("\x1b[2J\x07\x00")), r"ValueError: \x1b[2J\x07\x00", "<1>"),
    ],
)
def test_an_environment_that_raises_ends_the_trajectory_and_says_why(
    calculating: PreTrainedTokenizerFast, environment: type[Environment], said: str, expected: str
) -> None:
    response = played(calculating, environment, "<1>", "<2>", "<3>")
    assert response.environment_error is not None
    assert said in response.environment_error
    assert response.environment_error.isprintable()
    assert len(response.environment_error) <= 300
    assert written(calculating, response) == expected
    assert response.finish_reason == "stop"


def test_a_trajectory_that_fails_ends_no_other(calculating: PreTrainedTokenizerFast) -> None:
    class Picky(Calculator):
        def reset(self, prompt: Prompt, seed: int) -> None:
            if seed == 42:
                raise ValueError("not this one")

    episodes = episodes_of(ScriptedEngine(calculating, by_turn("<1>", "1$")), Picky, max_turns=2)
    episodes.submit([request(0, index) for index in range(3)], ROOMY)
    failed = {done.request.sample_index: done.response.environment_error is not None for done in all_of(episodes)}
    assert failed == {0: False, 1: True, 2: False}


def test_an_aborted_request_never_returns_and_can_be_submitted_again(calculating: PreTrainedTokenizerFast) -> None:
    engine = ScriptedEngine(calculating, by_turn("<1>", "<1>", "1$"))
    episodes = episodes_of(engine, max_turns=2)
    episodes.submit([request()], ROOMY)
    assert episodes.collect(0.0) == []
    assert episodes.in_flight == 1
    episodes.abort()
    assert (episodes.in_flight, engine.in_flight, episodes.collect(0.0)) == (0, 0, [])
    episodes.submit([request()], ROOMY)
    (done,) = all_of(episodes)
    assert written(calculating, done.response) == "<1>[1|]1<eos>"


def test_sources_are_played_side_by_side_each_by_its_own_rules(calculating: PreTrainedTokenizerFast) -> None:
    engine = ScriptedEngine(calculating, by_turn("<1>", "1$"))
    encoder = PromptEncoder(calculating, PromptsConfig(), stop_token_ids=[2, 5])
    rules = {
        "tool": EpisodeRules(encoder=encoder, environment=Calculator, max_turns=2),
        "once": EpisodeRules(encoder=encoder, environment=Calculator, max_turns=1),
        "plain": EpisodeRules(encoder=PromptEncoder(calculating, PromptsConfig())),
    }
    samplings: list[tuple[str, Sampling]] = []

    class Recorded(ScriptedEngine):
        def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
            samplings.extend((request.source, sampling) for request in requests)
            super().submit(requests, sampling)

    engine = Recorded(calculating, by_turn("<1>", "1$"))
    episodes = Episodes(engine, rules)
    of_sources = [replace(request(i), source=source) for i, source in enumerate(rules)]
    without_prompt = replace(of_sources[2], prompt=None)
    episodes.submit([*of_sources[:2], without_prompt], ROOMY)
    done = {each.request.source: each.response for each in all_of(episodes)}
    assert {source: written(calculating, response) for source, response in done.items()} == {
        "tool": "<1>[1|]1<eos>",
        "once": "<1>",
        "plain": "<1>",
    }
    assert {source: response.finish_reason for source, response in done.items()} == {
        "tool": "stop",
        "once": "length",
        "plain": "stop",
    }
    in_tool = replace(ROOMY, stop=Calculator.stop, stop_token_ids=(2, 5))
    plain = replace(ROOMY, stop_token_ids=(calculating.eos_token_id,))
    assert samplings == [("tool", in_tool), ("once", in_tool), ("plain", plain), ("tool", in_tool)]


def test_an_interrupted_response_without_environment_keeps_its_tokens(calculating: PreTrainedTokenizerFast) -> None:
    class Interrupted(ScriptedEngine):
        def interrupt(self) -> list[Trajectory]:
            return self.collect(0.0)

    episodes = episodes_of(Interrupted(calculating, by_turn("<1>")))
    episodes.submit([request(0), replace(request(1), source="plain")], ROOMY)
    unfinished = {each.request.source: each for each in episodes.interrupt()}
    assert unfinished[DEFAULT_SOURCE] == unstarted(request(0)), "the calculator's state is lost"
    assert written(calculating, unfinished["plain"].response) == "<1>"
    assert episodes.in_flight == 0


def test_it_starts_with_its_first_turn_and_ends_with_its_last(
    calculating: PreTrainedTokenizerFast,
) -> None:
    heard: list[str] = []
    engine = ScriptedEngine(calculating, by_turn("<1>", "<2>", "3$"))
    episodes = episodes_of(engine, each_turn=lambda: heard.append("turn"))
    episodes.submit([request()], ROOMY)
    (done,) = all_of(episodes)
    assert (done.t_started, done.t_finished) == (1.0, 3.5)
    assert len(done.t_environment) == 2 * 3 and list(done.t_environment) == sorted(done.t_environment)
    assert heard == ["turn"] * 3


def test_a_request_without_its_prompt_is_refused(calculating: PreTrainedTokenizerFast) -> None:
    episodes = episodes_of(ScriptedEngine(calculating, by_turn("1$")))
    with pytest.raises(ValueError):
        episodes.generate([[1, 2]], ROOMY, seed=0)
    (response,) = episodes.generate([[1, 2]], ROOMY, seed=0, prompts=[prompt()])
    assert written(calculating, response) == "1<eos>"
