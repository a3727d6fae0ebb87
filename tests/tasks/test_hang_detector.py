"""When a stage is taken to hang, second by second, without a clock."""

from collections.abc import Iterable

from millrace.runtime.messages import STARTING, Heartbeat
from tasks.hang_detector import HangDetector

HANG, START = 45.0, 600.0
AT_WORK = Heartbeat(doing="train", ready=True)
LOADING = Heartbeat(doing="loading the model", ready=False)


def detector() -> HangDetector:
    return HangDetector(started=0.0, hang_seconds=HANG, start_seconds=START)


def hangs_at(watched: HangDetector, seconds: Iterable[int]) -> int | None:
    """The first of these seconds at which it hangs."""
    return next((now for now in seconds if watched.hangs(now)), None)


def test_a_stage_that_never_says_anything_hangs_after_start_seconds() -> None:
    watched = detector()
    assert hangs_at(watched, range(1, 1000)) == START + 1
    assert watched.doing == STARTING


def test_a_stage_without_a_limit_at_work_has_start_seconds_throughout() -> None:
    watched = HangDetector(started=0.0, hang_seconds=None, start_seconds=START)
    watched.record(AT_WORK)
    assert hangs_at(watched, range(1, 1000)) == START + 1
    assert watched.limit == "start_seconds"


def test_a_stage_that_loads_has_start_seconds_from_its_last_heartbeat() -> None:
    watched = detector()
    assert hangs_at(watched, range(1, 500)) is None
    watched.record(LOADING)
    assert hangs_at(watched, range(500, 2000)) == 499 + START + 1


def test_a_stage_at_work_hangs_after_hang_seconds_and_what_it_was_at_is_known() -> None:
    watched = detector()
    watched.record(AT_WORK)
    assert hangs_at(watched, range(1, 100)) == HANG + 1
    assert (watched.doing, watched.silent_seconds) == ("train", HANG + 1)


def test_each_heartbeat_restarts_the_time() -> None:
    watched = detector()
    for now in range(1, 1000):
        if now % 40 == 1:
            watched.record(AT_WORK)
        assert not watched.hangs(now)


def test_the_time_at_work_begins_when_it_is_ready() -> None:
    watched = detector()
    assert hangs_at(watched, range(1, 101)) is None
    assert watched.at_work_seconds == 0
    watched.record(AT_WORK)
    assert hangs_at(watched, range(101, 131)) is None
    assert watched.at_work_seconds == 30


def test_a_supervisor_that_was_itself_stopped_blames_nobody_for_that_time() -> None:
    watched = detector()
    watched.record(AT_WORK)
    assert not watched.hangs(1)
    assert not watched.hangs(5000)
    assert watched.silent_seconds == 2
    assert hangs_at(watched, range(5001, 6000)) == 5000 + HANG - 1
