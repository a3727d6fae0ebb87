"""When a checkpoint is due, minute by minute, without a clock."""

import pytest

from millrace.training.checkpoints.saving import CheckpointSchedule

MINUTE = 60.0


def due(schedule: CheckpointSchedule, version: int, minute: float) -> bool:
    """Whether it is, and if so it is saved."""
    is_due = schedule.is_due(version, minute * MINUTE)
    if is_due:
        schedule.saved(minute * MINUTE)
    return is_due


@pytest.mark.parametrize(
    ("every", "minutes", "has_one", "saved"),
    [
        (1000, 10.0, False, [1, 11, 21, 31]),
        (1000, 10.0, True, [10, 20, 30]),
        (5, 10.0, True, [5, 10, 15, 20, 25, 30]),
    ],
    ids=["the first early", "a stored checkpoint", "a save by number restarts the time"],
)
def test_with_long_steps_checkpoints_are_saved_by_time(
    every: int, minutes: float, has_one: bool, saved: list[int]
) -> None:
    schedule = CheckpointSchedule(every, minutes, has_one=has_one, now=0.0)
    assert [minute for minute in range(1, 35) if due(schedule, minute, minute)] == saved


def test_with_short_steps_versions_are_saved_by_number() -> None:
    schedule = CheckpointSchedule(4, None, has_one=False, now=0.0)
    assert [version for version in range(1, 13) if due(schedule, version, 0.0)] == [4, 8, 12]
