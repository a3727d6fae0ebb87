"""Which checkpoint is evaluated next."""

import pytest

from millrace.evaluation.due import due
from storage.checkpoints import Checkpoint


def checkpoint(step: int, incarnation: int = 0) -> Checkpoint:
    return Checkpoint(step=step, files={}, state={}, incarnation=incarnation)


@pytest.mark.parametrize(
    ("steps", "done", "expected"),
    [
        ([], [], []),
        ([0], [], []),
        ([0, 5, 10, 13], [], [10, 5]),
        ([0, 5, 10, 15, 20], [10], [20, 15]),
        ([0, 5, 10, 15, 20], [20], []),
        ([0, 5, 10, 15, 20, 22], [5, 15], [20]),
        ([0, 3, 6, 9, 12], [], []),
    ],
)
def test_multiples_are_due_that_are_newer_than_any_that_is_done(
    steps: list[int], done: list[int], expected: list[int]
) -> None:
    log = [checkpoint(step) for step in steps]
    found = due(reversed(log), 5, lambda one: one.step in done)
    assert [one.step for one in found] == expected


def test_a_rolled_back_version_is_not_due_and_the_one_made_in_its_place_is() -> None:
    log = [checkpoint(5), checkpoint(10), checkpoint(15), checkpoint(5, 1), checkpoint(8, 1), checkpoint(10, 1)]
    found = due(reversed(log), 5, lambda one: one.step == 5)
    assert [(one.step, one.incarnation) for one in found] == [(10, 1)]
