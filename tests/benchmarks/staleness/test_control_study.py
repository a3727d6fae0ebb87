"""The study of adaptive control: its figures, and stages that are slowed down from outside."""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.staleness_study.comparison import against_best, phase_losses
from benchmarks.staleness_study.control import medians, phases
from benchmarks.staleness_study.curves import write_curves
from benchmarks.staleness_study.disturbances import Phase, disturbed
from benchmarks.staleness_study.time_to_accuracy import reached, smoothed
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


def test_a_point_of_a_smoothed_curve_is_the_mean_of_three_evaluations_when_the_last_of_them_is_there() -> None:
    curve = [(0.0, 0.3), (10.0, 0.6), (20.0, 0.0), (30.0, 0.9)]
    assert smoothed(curve) == [(20.0, pytest.approx(0.3)), (30.0, pytest.approx(0.5))]
    assert smoothed(curve[:2]) == []


def cell(bound: str, times: list[float | None], steps: tuple[float, float] = (1.0, 1.0)) -> dict[str, object]:
    found = [time for time in times if time is not None]
    return {
        "task": "tiny",
        "loss": "aipo",
        "bound": bound,
        "seeds": len(times),
        "reached": len(found),
        "seconds_to_target": statistics.median(found) if found else None,
        "all_seconds_to_target": times,
        "phases": [{"name": "as ever", "seconds_per_step": one} for one in steps],
    }


def test_adaptive_control_is_compared_seed_by_seed_with_the_fixed_bound_that_was_fastest() -> None:
    (row,) = against_best([cell("1", [9.0, 9.0]), cell("2", [4.0, 8.0]), cell("adaptive", [2.0, 16.0])])
    assert row["best"] == "2"
    assert row["ratio"] == pytest.approx(1.0), "half as long once, twice as long once"
    low, high = row["interval"]
    assert low == pytest.approx(1 / high)


def test_one_seed_has_a_ratio_and_no_interval() -> None:
    (row,) = against_best([cell("1", [9.0]), cell("adaptive", [18.0])])
    assert (row["ratio"], row["interval"]) == (pytest.approx(2.0), None)


def test_a_bound_that_missed_the_target_once_is_not_the_best_and_adaptive_control_that_did_has_no_ratio() -> None:
    (row,) = against_best([cell("1", [9.0, 9.0]), cell("2", [4.0, None]), cell("adaptive", [2.0, None])])
    assert (row["best"], row["ratio"], row["interval"]) == ("1", None, None)


def test_what_a_bound_loses_in_a_phase_is_measured_against_the_fixed_bound_that_was_best_in_it() -> None:
    lost = phase_losses(
        [cell("1", [1.0], (1.0, 4.0)), cell("8", [1.0], (2.0, 2.0)), cell("adaptive", [1.0], (1.1, 1.8))]
    )
    assert [row["largest"] for row in lost] == [2.0, 2.0, pytest.approx(1.1)]


def test_curves_are_drawn_for_every_task_and_bound(tmp_path: Path) -> None:
    curve = [(0.0, 0.1), (10.0, 0.5)]
    rows = [
        {"task": task, "bound": bound, "curve": curve, "curve_over_steps": curve}
        for task in ("tiny", "chain")
        for bound in ("1", "adaptive")
    ]
    write_curves(rows, {"tiny": 0.5, "chain": 0.4}, tmp_path / "figures" / "curves.svg")
    drawn = (tmp_path / "figures" / "curves.svg").read_text()
    assert drawn.count("<!-- held-out accuracy -->") == 4
    assert "<!-- adaptive -->" in drawn


def test_a_bound_has_the_medians_of_the_seeds_that_got_there() -> None:
    def row(seed: int, seconds: float | None, step: float) -> dict[str, object]:
        one = {"name": "as ever", "first": 1, "seconds_per_step": step}
        settings = {"task": "tiny", "loss": "aipo", "bound": "2", "seed": seed}
        figures = {"accuracy": 0.5, "seconds": 9.0, "staleness_mean": 1.0, "seconds_to_target": seconds}
        return {**settings, **figures, "phases": [one]}

    (medianed,) = medians([row(0, 4.0, 0.1), row(1, None, 0.3), row(2, 6.0, 0.2)])
    assert (medianed["reached"], medianed["seeds"], medianed["seconds_to_target"]) == (2, 3, 5.0)
    assert medianed["phases"] == [{"name": "as ever", "seconds_per_step": 0.2}]


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
