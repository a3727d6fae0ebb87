"""The study of adaptive control: its figures, and stages that are slowed down from outside."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.staleness_study.control import medians, phases, reached
from benchmarks.staleness_study.disturbances import Phase, disturbed
from storage.progress import write_progress
from storage.stores.factory import open_store


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that could be a stage."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_the_target_is_reached_between_two_evaluations() -> None:
    curve = [(0.0, 0.2), (10.0, 0.4), (20.0, 0.8), (30.0, 0.5), (40.0, 0.9)]
    assert reached(curve, 0.5) == pytest.approx(12.5)
    assert reached(curve, 0.95) is None


def test_a_bound_has_the_medians_of_the_seeds_that_got_there() -> None:
    def row(seed: int, seconds: float | None, step: float) -> dict[str, object]:
        one = {"name": "as ever", "first": 1, "seconds_per_step": step}
        settings = {"task": "tiny", "loss": "aipo", "bound": "2", "seed": seed}
        figures = {"accuracy": 0.5, "seconds": 9.0, "staleness_mean": 1.0, "seconds_to_target": seconds}
        return {**settings, **figures, "phases": [one]}

    (cell,) = medians([row(0, 4.0, 0.1), row(1, None, 0.3), row(2, 6.0, 0.2)])
    assert (cell["reached"], cell["seeds"], cell["seconds_to_target"]) == (2, 3, 5.0)
    assert cell["phases"] == [{"name": "as ever", "seconds_per_step": 0.2}]


def test_slow_phases_have_steps_as_ever_before_between_and_behind_them() -> None:
    assert [(one.first, one.last) for one in phases(100)] == [(20, 40), (60, 80)]


def test_a_stage_rests_while_its_phase_lasts_and_runs_on_afterwards(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    store = open_store(str(tmp_path))
    process = psutil.Process(sleeper.pid)

    def at(version: int) -> None:
        write_progress(store, "train", 0, {"pid": 1, "t": time.time(), "policy_version": version})

    write_progress(store, "generate", 0, {"pid": sleeper.pid, "t": time.time()})
    phase = Phase(name="slow", stage="generate", first=2, last=4, stopped_seconds=0.2, running_seconds=0.0)
    with disturbed(tmp_path, [phase]):
        at(1)
        assert not _stopped_within(process, 0.5)
        at(2)
        assert _stopped_within(process, 20.0)
    assert process.status() != psutil.STATUS_STOPPED


def _stopped_within(process: psutil.Process, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.status() == psutil.STATUS_STOPPED:
            return True
        time.sleep(0.01)
    return False
