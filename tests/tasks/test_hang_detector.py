"""When a stage counts as hung, second by second, without a clock."""

from collections.abc import Iterable

from millrace.runtime.messages import STARTING, Heartbeat
from tasks.hang_detector import HangDetector

HANG, START = 45.0, 600.0
AT_WORK = Heartbeat(doing="train", ready=True)
LOADING = Heartbeat(doing="loading the model", ready=False)


def detector(hang_seconds: float | None = HANG) -> HangDetector:
    return HangDetector(started=0.0, hang_seconds=hang_seconds, start_seconds=START)


def hangs_at(stage: HangDetector, seconds: Iterable[int]) -> int | None:
    """The first of these seconds at which it hangs."""
    return next((now for now in seconds if stage.hangs(now)), None)


def test_a_silent_stage_hangs_after_start_seconds() -> None:
    stage = detector()
    assert hangs_at(stage, range(1, 1000)) == START + 1
    assert stage.doing == STARTING


def test_without_a_limit_at_work_start_seconds_applies() -> None:
    stage = detector(hang_seconds=None)
    stage.record(AT_WORK)
    assert hangs_at(stage, range(1, 1000)) == START + 1
    assert stage.limit == "start_seconds"


def test_a_loading_stage_has_start_seconds_from_its_last_heartbeat() -> None:
    stage = detector()
    assert hangs_at(stage, range(1, 500)) is None
    stage.record(LOADING)
    assert hangs_at(stage, range(500, 2000)) == 499 + START + 1


def test_a_stage_at_work_hangs_hang_seconds_after_its_last_heartbeat() -> None:
    stage = detector()
    for now in range(1, 1000):
        if now % 40 == 1:
            stage.record(AT_WORK)
        assert not stage.hangs(now)
    stage.record(AT_WORK)
    assert hangs_at(stage, range(1000, 1100)) == 999 + HANG + 1
    assert (stage.doing, stage.silent_seconds, stage.limit) == ("train", HANG + 1, "hang_seconds")


def test_the_time_at_work_begins_when_it_is_ready() -> None:
    stage = detector()
    assert hangs_at(stage, range(1, 101)) is None
    assert stage.at_work_seconds == 0
    stage.record(AT_WORK)
    assert hangs_at(stage, range(101, 131)) is None
    assert stage.at_work_seconds == 30


def test_a_suspended_supervisor_does_not_count_its_own_absence() -> None:
    stage = detector()
    stage.record(AT_WORK)
    assert not stage.hangs(1)
    assert not stage.hangs(5000)
    assert stage.silent_seconds == 2
    assert hangs_at(stage, range(5001, 6000)) == 5000 + HANG - 1
