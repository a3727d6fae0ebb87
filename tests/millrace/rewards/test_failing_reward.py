"""A run whose reward fails for every response of a source ends; one whose reward fails now and then does not."""

import pytest

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.rewards.scorer import FailingReward

ERROR = "TypeError: reward is None; expected a finite number"
SOURCES = {"sums": {"scoring": {"reward": "math"}}, "words": {"generation": {"group_size": 3}}}


def failing_reward(sources: dict[str, object] | None = None) -> FailingReward:
    """For steps of six responses, or nine of the source `words`."""
    config = {
        "training": {"max_steps": 1, "groups_per_step": 3},
        "generation": {"group_size": 2, "groups_per_batch": 1},
        "sources": sources or {},
    }
    return FailingReward(RunConfig.model_validate(config).by_source())


def test_a_whole_step_without_a_score_ends_the_run_with_the_first_error() -> None:
    failing = failing_reward()
    failing.check([("default", error) for error in ("another", "another", None)])
    failing.check([("default", error) for error in (ERROR, "another", "another", "another")])
    with pytest.raises(InputError) as raised:
        failing.check([("default", "another")] * 2)
    assert raised.value.key == "scoring.reward"
    assert ERROR in raised.value.read


def test_one_score_in_a_step_is_enough() -> None:
    failing = failing_reward()
    for _ in range(10):
        failing.check([("default", error) for error in [ERROR] * 4 + [None]])


@pytest.mark.parametrize(("source", "responses"), [("sums", 6), ("words", 9)])
def test_a_source_without_a_score_ends_the_run_whatever_the_others_earn(source: str, responses: int) -> None:
    failing = failing_reward(SOURCES)
    (other,) = SOURCES.keys() - {source}
    for _ in range(responses - 1):
        failing.check([(source, ERROR), (other, None)])
    with pytest.raises(InputError) as raised:
        failing.check([(source, ERROR)])
    assert raised.value.key == f"sources.{source}.scoring.reward"
