"""A run whose reward fails for every response ends; one whose reward fails now and then does not."""

import pytest

from millrace.errors import InputError
from millrace.rewards.scorer import FailingReward

ERROR = "TypeError: reward is None; expected a finite number"


def test_a_whole_step_without_a_score_ends_the_run_with_the_first_error() -> None:
    failing = FailingReward("python", 6)
    failing.check(["another", "another", None])
    failing.check([ERROR, "another", "another", "another"])
    with pytest.raises(InputError) as raised:
        failing.check(["another", "another"])
    assert raised.value.key == "scoring.reward"
    assert ERROR in raised.value.read


def test_one_score_in_a_step_is_enough() -> None:
    failing = FailingReward("python", 6)
    for _ in range(10):
        failing.check([ERROR] * 4 + [None])
