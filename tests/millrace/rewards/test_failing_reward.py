"""A run whose reward fails for every response ends; one whose reward fails now and then does not."""

import pytest

from millrace.errors import InputError
from millrace.rewards.scorer import FailingReward

ERROR = "TypeError: reward is of type NoneType; expected a number"


def test_a_whole_step_without_a_score_ends_the_run_with_the_first_error() -> None:
    failing = FailingReward("python", 3)
    failing.check([0, 1, 2], ["another", "another", None])
    failing.check([3, 3, 4, 4], [ERROR, "another", "another", "another"])
    with pytest.raises(InputError) as raised:
        failing.check([5, 5], ["another", "another"])
    assert ERROR in str(raised.value)


def test_one_score_in_a_step_is_enough() -> None:
    failing = FailingReward("python", 3)
    for group_id in range(0, 30, 3):
        failing.check([group_id, group_id, group_id + 1, group_id + 2, group_id + 2], [ERROR] * 4 + [None])
