"""The rewards of several sources in one scorer: each response is scored by its source's, and equal ones load once."""

from collections.abc import Mapping
from typing import Any

import pytest
from support.rewards.stub_service import graded, stub_service
from support.streams.rows import trajectories_of
from transformers import PreTrainedTokenizerFast

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.models.decoder import decoder_of
from millrace.rewards import factory
from millrace.rewards.base import Reward, Score
from millrace.rewards.rows import UnscoredRows
from millrace.rewards.scorer import Scorer, make_scorer
from millrace.rewards.services.meter import LimitReached
from millrace.types import Prompt
from storage.schema import SCORE
from storage.validation import validate

OWN = "tests.support.rewards.own_rewards"
PROMPT = Prompt(prompt_id="p", text="?", answer="42", source="test")


def scorer_of(**scoring: Mapping[str, Any]) -> Scorer:
    """The scorer of sources with these sections `scoring`."""
    sources = {name: {"scoring": section} for name, section in scoring.items()}
    config = {"training": {"max_steps": 1}, "sources": sources}
    return make_scorer(RunConfig.model_validate(config).by_source())


class CountedModel(Reward):
    """In place of a reward model: its reward is the length of the model's name."""

    name = "reward_model"
    loads: list[str] = []  # noqa: RUF012 — shared on purpose

    def __init__(self, model: str) -> None:
        self._model = model

    def load(self) -> None:
        self.loads.append(self._model)
        self.version = self._model

    def score(self, prompt: Prompt, response: str) -> Score:
        if response == "?":
            raise ArithmeticError("not a number")
        return Score(reward=float(len(self._model)))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were loaded."""
    monkeypatch.setitem(factory._PARTS, "reward_model", (CountedModel, ["model"]))  # type: ignore[arg-type]
    monkeypatch.setattr(CountedModel, "loads", [])
    return CountedModel.loads


def test_each_row_is_scored_by_the_reward_of_its_source(tokenizer: PreTrainedTokenizerFast) -> None:
    # The text 12 is right as an expression, and as text it is not.
    sources, texts = ["sums", "proofs", "words"] * 2, ["12", "12", "12", "7", "7", "7"]
    tokens = [tokenizer.convert_tokens_to_ids(list(text)) for text in texts]
    trajectories = trajectories_of(sources, tokens, answer="24/2")
    with scorer_of(
        sums={"reward": "exact_match"}, proofs={"reward": "math"}, words={"reward": f"{OWN}:length"}
    ) as scorer:
        scores = UnscoredRows.submit(trajectories, scorer, decoder_of(tokenizer)).collect()
    validate(scores, SCORE)
    assert scores["row_id"].to_pylist() == trajectories["row_id"].to_pylist()
    assert scores["reward"].to_pylist() == [0.0, 1.0, 2.0, 0.0, 0.0, 1.0]
    versions = scores["verifier_version"].to_pylist()
    assert versions == [scorer.versions[source] for source in sources]
    assert len(set(versions)) == 3


def test_equal_reward_models_are_loaded_once_also_as_a_part_of_a_sum(loads: list[str]) -> None:
    judge = {"reward": "reward_model", "model": "small"}
    scorer = scorer_of(
        chat=judge,
        words=judge,
        letters={**judge, "reward": "weighted_sum", "weights": {"reward_model": 2.0, "exact_match": 1.0}},
        poems={**judge, "model": "larger"},
    )
    with scorer:
        scores = scorer.score_many([(source, PROMPT, "42") for source in ("words", "letters", "poems", "chat")])
        assert scorer.versions["chat"] == scorer.versions["words"] == "small"
        assert scorer.versions["poems"] == "larger"
    assert [score.reward for score in scores] == [5.0, 11.0, 6.0, 5.0]
    assert loads == ["small", "larger"]


def test_isolated_rewards_with_other_options_stay_apart_in_one_pool() -> None:
    first, last = {"answer_pattern": r"^(\d+)"}, {"answer_pattern": r"(\d+)$"}
    with scorer_of(first=first, last=last, first_too=first) as scorer:
        scores = scorer.score_many([(name, PROMPT, "42 or 7") for name in ("last", "first", "first_too")])
        assert len(scorer._pools) == 1
    assert [score.reward for score in scores] == [0.0, 1.0, 1.0]


def test_each_source_has_its_own_limits() -> None:
    sleep = {"reward": f"{OWN}:sleep"}
    with scorer_of(hasty={**sleep, "timeout_seconds": 0.2}, patient=sleep) as scorer:
        hasty, patient = scorer.score_many([("hasty", PROMPT, "0.5"), ("patient", PROMPT, "0.5")])
    assert (hasty.status, patient.status) == ("timeout", "ok")


def test_the_first_failure_of_each_source_is_reported_once(loads: list[str]) -> None:
    judge = {"reward": "reward_model", "model": "small"}
    reports: list[str] = []
    with scorer_of(chat=judge, words=judge) as scorer:
        scorer.on_first_failure = reports.append
        scorer.score_many([(source, PROMPT, "?") for source in ("words", "chat", "words")])
    assert len(reports) == 2
    assert "source words" in reports[0] and "source chat" in reports[1]


@pytest.mark.parametrize(
    "scoring", [{"reward": "maths"}, {"reward": f"{OWN}:nothing"}, {"reward": "reward_model", "model": "/nowhere"}]
)
def test_a_reward_that_can_not_be_used_names_its_source(scoring: dict[str, Any]) -> None:
    with pytest.raises(InputError) as raised:
        scorer_of(sums={"reward": f"{OWN}:length"}, words=scoring).check()
    assert (raised.value.key or "").startswith("sources.words.scoring.")


def test_a_check_returns_the_versions_by_name_and_differing_ones_by_source_too(loads: list[str]) -> None:
    scorer = scorer_of(
        sums={"answer_pattern": "#(.*)"},
        words={},
        chat={"reward": "reward_model", "model": "small"},
        poems={"reward": "reward_model", "model": "larger"},
    )
    assert scorer.check() == {"exact_match": "2"}
    with scorer:
        assert scorer.check() == {"exact_match": "2", "reward_model": "small", "reward_model of poems": "larger"}


def test_the_prompts_of_a_source_are_checked_by_its_reward() -> None:
    scorer = scorer_of(proofs={"reward": "math"}, words={"reward": "exact_match"})
    empty = Prompt(prompt_id="p", text="?", answer="", source="test")
    assert scorer.first_unusable("words", [PROMPT, empty]) is None
    unusable = scorer.first_unusable("proofs", [PROMPT, empty])
    assert unusable is not None and unusable[0] is empty


def test_a_limit_of_requests_names_the_source_that_sets_it() -> None:
    with stub_service(graded(lambda *_: 1.0)) as service:
        judge = {"reward": "judge", "judge": {"model": "m"}, "endpoint": {"url": service.url, "max_requests": 1}}
        with scorer_of(words={"reward": "exact_match"}, essays=judge) as scorer, pytest.raises(LimitReached) as raised:
            scorer.score_many([("words", PROMPT, "42"), ("essays", PROMPT, "42"), ("essays", PROMPT, "7")])
    assert raised.value.key == "sources.essays.scoring.endpoint.max_requests"
