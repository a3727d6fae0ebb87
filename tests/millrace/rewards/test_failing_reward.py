"""A run whose reward fails for every response ends; one whose reward fails now and then does not."""

import pytest

from millrace.errors import InputError
from millrace.rewards.failing import FailingReward

ERROR = "TypeError: reward is of type NoneType; expected a number"


@pytest.fixture
def failing() -> FailingReward:
    return FailingReward("python", 3)


def test_a_whole_step_without_a_score_ends_the_run_with_the_first_error(failing: FailingReward) -> None:
    failing.check([0, 0, 1, 1], [ERROR, "another", "another", "another"])
    with pytest.raises(InputError, match=rf"scoring\.reward is python.* 6 responses .* 3 groups.*first.*{ERROR}"):
        failing.check([2, 2], ["another", "another"])


def test_one_score_in_a_step_is_enough(failing: FailingReward) -> None:
    for group_id in range(0, 30, 3):
        failing.check([group_id, group_id, group_id + 1, group_id + 2, group_id + 2], [ERROR] * 4 + [None])


def test_groups_are_counted_across_parts_and_from_the_last_score_on(failing: FailingReward) -> None:
    failing.check([0, 1, 2], [ERROR, ERROR, None])
    failing.check([3], [ERROR])
    failing.check([4], [ERROR])
    with pytest.raises(InputError, match=r"3 responses .* 3 groups"):
        failing.check([5], [ERROR])


def test_a_call_that_the_sandbox_refused_is_explained(failing: FailingReward) -> None:
    with pytest.raises(InputError, match="has no network, starts no process and writes no file"):
        failing.check([0, 1, 2], ["PermissionError: [Errno 1] Operation not permitted"] * 3)
