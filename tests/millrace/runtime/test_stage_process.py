"""The common part of every stage process."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from configs.schema import RunConfig
from configs.training import TrainingConfig
from millrace.errors import USER_ERROR, InputError
from millrace.runs.record import create_run
from millrace.runtime.arguments import StageArguments
from millrace.runtime.entry import drain_on_signals
from millrace.runtime.messages import Event, Heartbeat, read_line
from millrace.runtime.stage import Stage
from storage import layout
from storage.errors import StoreRefused
from storage.progress import read_progress
from storage.schema import METRIC
from storage.stores.base import Store
from storage.stores.local import LocalStore
from storage.streams.stream import StreamReader


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return LocalStore(tmp_path)


def stage(store: Store, attempt: int = 0) -> Stage:
    arguments = StageArguments(run_url=store.url, attempt=attempt, replica=0, handover=Path("/nowhere"))
    return Stage(
        name="generate", arguments=arguments, config=RunConfig(training=TrainingConfig(max_steps=1)), store=store
    )


def status(store: Store) -> dict:
    return read_progress(store)["generate-0"]


def test_a_restarted_stage_continues_its_counts(store: Store) -> None:
    first = stage(store)
    with first.busy("generate"):
        first.update_status(tokens=5)
    first.close()
    first_status = status(store)
    second = stage(store, attempt=1)
    second.update_status(now=True, tokens=second.value("tokens") + 2)
    after = status(store)
    assert after["tokens"] == 7
    assert after["seconds"] == first_status["seconds"]
    assert after["attempt"] == 1
    assert after["t"] > first_status["t"]
    assert after["doing"] == "starting"


@pytest.mark.parametrize("replaced", [False, True])
def test_a_stage_whose_run_is_moved_away_ends(tmp_path: Path, replaced: bool) -> None:
    store = LocalStore(tmp_path / "run")
    create_run(store, "run", {})
    waiting = stage(store)
    waiting.update_status(now=True)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    if replaced:
        create_run(store, "run", {})
    with pytest.raises(StoreRefused):
        waiting.wait(lambda: False, why="waiting for nothing")
    assert (tmp_path / "run").exists() is replaced


def test_polling_in_vain_is_idle_and_a_successful_poll_is_work(store: Store) -> None:
    waiting = stage(store)
    looks = iter([False, False, True])

    def look() -> bool:
        is_found = next(looks)
        if is_found:
            with waiting.busy("update_weights"):
                time.sleep(0.01)
        return is_found

    assert waiting.wait(look, why="waiting for anything")
    waiting.close()
    seconds = status(store)["seconds"]
    assert set(seconds) == {"idle", "loading", "update_weights"}
    assert seconds["update_weights"] >= 0.01
    assert seconds["idle"] > 0


def test_the_longer_a_stage_waits_the_less_often_it_polls(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    polled: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def look() -> bool:
        polled.append(now[0])
        return now[0] >= 60

    assert stage(store).wait(look, why="waiting for a minute")
    gaps = [after - before for before, after in pairwise(polled)]
    assert gaps[0] == pytest.approx(store.poll_seconds)
    assert all(gap <= max(1.01 * store.poll_seconds, 0.021 * before) for before, gap in zip(polled, gaps, strict=False))
    assert len(polled) < 60 / store.poll_seconds / 8


SEND_SIGNALS = """
import os, random, sys, time
for _ in range(3000):
    os.kill(int(sys.argv[1]), 15)
    time.sleep(random.random() / 1000)
"""


def test_a_signal_may_come_at_any_moment_of_a_wait(store: Store) -> None:
    waiting = stage(store)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    drain_on_signals(waiting)
    # From another process: signals sent by a thread only ever meet this one where it lets go of the interpreter.
    sender = subprocess.Popen([sys.executable, "-c", SEND_SIGNALS, str(os.getpid())])
    drained = 0
    try:
        while sender.poll() is None:
            waiting.draining = False
            drained += not waiting.wait(lambda: sender.poll() is not None, why="waiting for the signals to end")
    finally:
        sender.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert drained > 100


def lines(capsys: pytest.CaptureFixture[str]) -> list[Heartbeat | Event | str]:
    """Messages since the last call."""
    return [read_line(line) for line in capsys.readouterr().out.splitlines()]


def looks_in_vain(waiting: Stage, most: int) -> Callable[[], bool]:
    """A condition that never holds; after `most` looks the stage is asked to drain."""
    looks = iter(range(most))

    def look() -> bool:
        waiting.draining = next(looks, None) is None
        return False

    return look


def test_a_stage_reports_a_new_activity_at_once(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    working = stage(store)
    with working.loading():
        pass
    working.mark_ready("generator 0 ready")
    with working.busy("generate"):
        pass
    assert not working.wait(looks_in_vain(working, 1), why="waiting for weights")
    assert lines(capsys) == [
        Heartbeat(doing="loading the model", ready=False),
        Heartbeat(doing="loading the model", ready=True),
        "generator 0 ready",
        Heartbeat(doing="generate", ready=True),
        Heartbeat(doing="waiting for weights", ready=True),
    ]


def test_a_stage_sends_at_most_one_heartbeat_a_second(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    waiting = stage(store)
    started = time.monotonic()
    waiting.wait(looks_in_vain(waiting, 100), why="waiting for weights")
    heartbeats = lines(capsys)
    assert set(heartbeats) == {Heartbeat(doing="waiting for weights", ready=False)}
    assert len(heartbeats) <= 1 + (time.monotonic() - started)


def test_a_stage_that_awaits_its_engine_is_silent_but_for_progress(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = stage(store)
    waiting.awaits_engine = True
    with waiting.busy("update_weights"):
        waiting.update_status(now=True, policy_version=3)
    waiting.set_activity("generate")
    thread = threading.Thread(target=waiting.advance)
    thread.start()
    thread.join()
    assert lines(capsys) == [], "another thread makes no progress"
    for _ in range(1000):
        waiting.advance()
    assert lines(capsys) == [Heartbeat(doing="generate", ready=False)]
    assert status(store)["advances"] == 1, "as often as a heartbeat is due, however often it is called"
    waiting.awaits_engine = False
    waiting.set_activity("idle")
    assert lines(capsys) == [Heartbeat(doing="idle", ready=False)]


def test_a_milestone_that_quotes_an_event_stays_a_milestone(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    telling = stage(store)
    telling.emit_event("generator.lost", generator=1, sentence="late – by 30 s")
    written = capsys.readouterr().out
    event = read_line(written.rstrip())
    assert event == Event(kind="generator.lost", payload={"generator": 1, "sentence": "late – by 30 s"})
    telling.log(f"the reward failed of\n{written}")
    assert [type(line) for line in lines(capsys)] == [str] * 3


FOLLOWER = """
from millrace.errors import InputError
from millrace.runtime.entry import run_follower

def follow(arguments, config, store):
    print("this goes to the log")
    raise InputError(f"too few for {config.name}", key="training.max_steps", expected="2")

run_follower("train", 1, follow)
"""


def test_a_follower_prints_only_its_error_and_writes_no_status(store: Store) -> None:
    create_run(store, "a", RunConfig(training=TrainingConfig(max_steps=1)).model_dump(mode="json"))
    arguments = StageArguments(run_url=store.url, attempt=0, replica=0, handover=Path("/nowhere"))
    ended = subprocess.run(
        [sys.executable, "-c", FOLLOWER, *arguments.as_argv()], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert ended.returncode == USER_ERROR
    error = read_line(ended.stdout.rstrip())
    assert isinstance(error, InputError)
    assert str(error) == "training.max_steps is too few for campaign; expected 2"
    assert (error.key, error.expected) == ("training.max_steps", "2")
    assert read_progress(store) == {}


def times(store: Store, name: str = "generate") -> dict[str, float]:
    """Metrics of a stage that has ended, summed by name."""
    reader, seconds = StreamReader(store, layout.metrics(name, 0), METRIC), {}
    while (part := reader.next()) is not None:
        for row in part.table.to_pylist():
            seconds[row["name"]] = seconds.get(row["name"], 0.0) + row["value"]
    return seconds


def test_a_stages_time_is_measured_by_activity_and_wait(store: Store) -> None:
    working = stage(store)
    with working.busy("generate"):
        time.sleep(0.01)
    assert not working.wait(looks_in_vain(working, 3), why="waiting for room")
    working.update_status(tokens=12)
    working.close()
    measured, summed = times(store), status(store)["seconds"]
    assert measured["time/generate/seconds"] == pytest.approx(summed["generate"])
    assert measured["time/waiting for room/seconds"] == pytest.approx(summed["idle"])
    assert measured["total/tokens"] == 12
    assert measured["usage/cpu_cores"] >= 0
    assert measured["usage/memory_bytes"] > 1 << 20
