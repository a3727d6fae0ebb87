"""When a checkpoint is due, minute by minute, without a clock."""

from millrace.training.checkpoints.saving import CheckpointSchedule

MINUTE = 60.0


def due(schedule: CheckpointSchedule, version: int, minute: float) -> bool:
    """Whether it is, and if so it is saved."""
    is_due = schedule.is_due(version, minute * MINUTE)
    if is_due:
        schedule.saved(minute * MINUTE)
    return is_due


def test_versions_are_saved_by_their_number_however_fast_steps_are() -> None:
    schedule = CheckpointSchedule(4, None, has_one=False, now=0.0)
    assert [version for version in range(1, 13) if due(schedule, version, 0.0)] == [4, 8, 12]


def test_where_steps_are_long_the_first_is_saved_early_and_the_others_by_time() -> None:
    schedule = CheckpointSchedule(1000, 10.0, has_one=False, now=0.0)
    assert [minute for minute in range(1, 35) if due(schedule, minute, minute)] == [1, 11, 21, 31]


def test_a_run_that_has_one_already_waits_for_the_whole_time() -> None:
    schedule = CheckpointSchedule(1000, 10.0, has_one=True, now=0.0)
    assert [minute for minute in range(1, 15) if due(schedule, minute, minute)] == [10]


def test_one_that_is_saved_by_its_number_begins_the_time_anew() -> None:
    schedule = CheckpointSchedule(5, 10.0, has_one=True, now=0.0)
    assert [minute for minute in range(1, 20) if due(schedule, minute, minute)] == [5, 10, 15]
