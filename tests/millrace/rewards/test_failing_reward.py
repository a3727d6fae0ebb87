"""A run whose reward fails for every response of a source ends; one whose reward fails now and then does not."""

import pytest

from millrace.errors import InputError
from millrace.rewards.scorer import FailingReward

ERROR = "TypeError: reward is None; expected a finite number"
RESPONSES = {"sums": 6, "words": 9}
"""Of a step, by source."""


def test_a_whole_step_without_a_score_ends_the_run_with_the_first_error() -> None:
    failing = FailingReward({"default": "python"}, {"default": 6})
    failing.check([("default", error) for error in ("another", "another", None)])
    failing.check([("default", error) for error in (ERROR, "another", "another", "another")])
    with pytest.raises(InputError) as raised:
        failing.check([("default", "another")] * 2)
    assert raised.value.key == "scoring.reward"
    assert ERROR in raised.value.read


def test_one_score_in_a_step_is_enough() -> None:
    failing = FailingReward({"default": "python"}, {"default": 6})
    for _ in range(10):
        failing.check([("default", error) for error in [ERROR] * 4 + [None]])


@pytest.mark.parametrize("source", RESPONSES)
def test_a_source_without_a_score_ends_the_run_whatever_the_others_earn(source: str) -> None:
    failing = FailingReward(dict.fromkeys(RESPONSES, "math"), RESPONSES)
    (other,) = RESPONSES.keys() - {source}
    for _ in range(RESPONSES[source] - 1):
        failing.check([(source, ERROR), (other, None)])
    with pytest.raises(InputError) as raised:
        failing.check([(source, ERROR)])
    assert raised.value.key == f"sources.{source}.scoring.reward"
