"""Requests and measures of an examiner, with an engine whose answers are scripted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import pytest
from support.engines.scripted_engine import ScriptedEngine

from configs.task import EvaluationConfig, PromptsConfig
from millrace.bootstrap.tiny_model import character_tokenizer
from millrace.chat.encoder import PromptEncoder
from millrace.evaluation.examiner import EvaluationSet, Examiner, Rules, Stopped, evaluation_sets
from millrace.evaluation.results import HELD_OUT
from millrace.prompts.dataset import PromptSet
from millrace.rewards.base import Score, failed
from millrace.rewards.scorer import Scorer
from millrace.types import Prompt, Request, Sampling

TOKENIZER = character_tokenizer(["0123456789+="])
ENCODER = PromptEncoder(TOKENIZER, PromptsConfig())
RULES = Rules(
    encoder=ENCODER,
    sampling=Sampling(temperature=0.5, top_p=1.0, max_new_tokens=3),
    seed=100,
    batch_size=2,
    answer_pattern=None,
)
PROMPTS = [Prompt(prompt_id=str(n), text=f"{n}+{n}=", answer=str(2 * n), source="s") for n in range(1, 5)]


class FakeScorer:
    """A response earns 1 if it ends with the answer; one of the source `strict`, only if it is the answer.

    "0" in a response makes the reward fail.
    """

    def score_many(self, items: Sequence[tuple[str, Prompt, str]], each: Callable[[], None]) -> list[Score]:
        each()
        return [self._score(source, prompt.answer, response) for source, prompt, response in items]

    def _score(self, source: str, answer: str, response: str) -> Score:
        if "0" in response:
            return failed("no zeros")
        return Score(reward=float(response == answer if source == "strict" else response.endswith(answer)))


def examiner_of(
    engine: ScriptedEngine,
    rules: Mapping[str, Rules] = {"sums": RULES},
    continues: Callable[[], bool] = lambda: True,
) -> Examiner:
    return Examiner(engine, cast(Scorer, FakeScorer()), rules, continues)


def right_below_three(request: Request) -> str:
    assert request.prompt is not None
    number = int(request.prompt.text[0])
    return f"{2 * number}$" if number < 3 else "9$"


def test_a_set_has_an_accuracy_and_if_sampled_pass_at_k_and_a_majority() -> None:
    examiner = examiner_of(ScriptedEngine(TOKENIZER, right_below_three))
    measured, answered = examiner.measure("sums", EvaluationSet(prompts=PROMPTS, samples=1))
    assert [[answer.response for answer in row.answers] for row in answered] == [["2"], ["4"], ["9"], ["9"]]
    assert (measured["accuracy"], measured["prompts"], measured["errors"]) == (0.5, 4, 0)
    low, high = measured["accuracy_interval"]
    assert 0 < low < 0.5 < high < 1
    assert "pass_at" not in measured
    easy, answered = examiner.measure("sums", EvaluationSet(prompts=PROMPTS[:2], samples=2))
    assert [(row.prompt, len(row.answers)) for row in answered] == [(PROMPTS[0], 3), (PROMPTS[1], 3)]
    assert (easy["accuracy"], easy["prompts"], easy["samples"]) == (1.0, 2, 2)
    assert easy["pass_at"]["2"]["value"] == easy["majority"]["value"] == 1.0


def test_a_set_without_any_score_has_no_accuracy() -> None:
    engine = ScriptedEngine(TOKENIZER, lambda request: "2$" if request.prompt == PROMPTS[0] else "0$")
    measured, _ = examiner_of(engine).measure("sums", EvaluationSet(prompts=PROMPTS[1:], samples=2))
    assert (measured["accuracy"], measured["accuracy_interval"], measured["errors"]) == (None, None, 3)
    assert "pass_at" not in measured
    scored, _ = examiner_of(engine).measure("sums", EvaluationSet(prompts=PROMPTS, samples=1))
    assert (scored["accuracy"], scored["errors"]) == (0.25, 3)


def test_a_set_is_asked_and_scored_as_its_source_says() -> None:
    engine = ScriptedEngine(TOKENIZER, lambda request: f"1{right_below_three(request)}")
    told: list[tuple[str, int, Sampling]] = []
    submit = engine.submit

    def noted(requests: Sequence[Request], sampling: Sampling) -> None:
        told.extend((request.source, len(request.prompt_tokens), sampling) for request in requests)
        submit(requests, sampling)

    engine.submit = noted  # type: ignore[method-assign]
    prefixed = PromptEncoder(TOKENIZER, PromptsConfig(template="1{prompt}"))
    brief = Sampling(temperature=0.25, top_p=0.5, top_k=2, max_new_tokens=4)
    examiner = examiner_of(engine, {"loose": RULES, "strict": replace(RULES, encoder=prefixed, sampling=brief)})
    accuracies = [
        examiner.measure(source, EvaluationSet(prompts=PROMPTS[:1], samples=2))[0]["accuracy"]
        for source in ("loose", "strict")
    ]
    assert accuracies == [1.0, 0.0]
    greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=3)
    loose = [("loose", 5, sampling) for sampling in (greedy, RULES.sampling, RULES.sampling)]
    strict = [("strict", 6, sampling) for sampling in (replace(greedy, max_new_tokens=4), brief, brief)]
    assert told == loose + strict


def test_the_answer_pattern_of_the_source_finds_the_answers_that_vote() -> None:
    engine = ScriptedEngine(TOKENIZER, lambda request: ["9$", "1=2$", "3=2$"][request.seed % 100])
    last_digit = replace(RULES, batch_size=4, answer_pattern=r"(\d)$")
    examiner = examiner_of(engine, {"sums": RULES, "chains": last_digit})
    majorities = [
        examiner.measure(source, EvaluationSet(prompts=PROMPTS[:1], samples=3))[0]["majority"]["value"]
        for source in ("sums", "chains")
    ]
    assert majorities == [0.0, 1.0]


def test_no_two_answers_of_a_set_share_a_seed() -> None:
    engine = ScriptedEngine(TOKENIZER, right_below_three)
    requested: list[tuple[float, int]] = []
    submit = engine.submit

    def noted(requests: list[Request], sampling: Sampling) -> None:
        requested.extend((sampling.temperature, request.seed) for request in requests)
        submit(requests, sampling)

    engine.submit = noted  # type: ignore[assignment]
    examiner_of(engine).measure("sums", EvaluationSet(prompts=PROMPTS, samples=2))
    assert requested == [(0.0, n) for n in range(4)] + [(0.5, 100 + n) for n in range(8)]


def test_a_stopped_evaluation_leaves_nothing_in_flight() -> None:
    continues = iter([True, True, False])
    engine = ScriptedEngine(TOKENIZER, right_below_three)
    examiner = examiner_of(engine, continues=lambda: next(continues))
    with pytest.raises(Stopped):
        examiner.measure("sums", EvaluationSet(prompts=PROMPTS, samples=1))
    assert engine.in_flight == 0


def test_each_set_has_its_number_of_samples() -> None:
    config = EvaluationConfig.model_validate({"samples": 2, "sets": {"hard": {"source": "chains", "samples": 4}}})
    sets = evaluation_sets(config, PromptSet(train=(), eval=tuple(PROMPTS), sets={"hard": tuple(PROMPTS[:1])}))
    assert [(name, len(each.prompts), each.samples) for name, each in sets.items()] == [
        (HELD_OUT, len(PROMPTS), 2),
        ("hard", 1, 4),
    ]
