"""The benchmark of the dashboard measures what it says; the figures themselves are taken by hand."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.dashboard.__main__ import measure_stored, targets_met
from benchmarks.dashboard.live import looked_at, post_of_page, serving
from benchmarks.stored_run.run import Shape, make_run
from storage.stores.factory import open_store

_ROOT = Path(__file__).parents[2]
_DEADLINE = 60.0
_VIEWS = {"look", "staleness", "flow", "learning", "ledger"}
_STORED = {"first_seconds": 2.9, "refresh_seconds": 0.4, "peak_bytes": 900e6}


@pytest.mark.extended
def test_a_fresh_process_looks_at_the_run_before_and_after_a_part_was_added(tmp_path: Path) -> None:
    result = measure_stored(tmp_path / "stored", 2000, rounds=2)
    assert set(result["first"]) == set(result["refresh"]) == _VIEWS
    assert all(seconds > 0 for seconds in [*result["first"].values(), *result["refresh"].values()])
    # Dropped groups come on top of those that a step trains.
    assert result["trajectories"] >= 2000
    assert result["first_seconds"] == pytest.approx(result["first"]["look"] + result["first"]["staleness"], rel=0.5)
    assert 10e6 < result["bytes_before"] < result["peak_bytes"]

    # What is there is not made again.
    assert measure_stored(tmp_path / "stored", 2000, rounds=1)["trajectories"] > result["trajectories"]


@pytest.mark.parametrize(
    ("changes", "ratio", "missed"),
    [
        ({}, {"served": 1.009, "watched": 1.0}, set()),
        ({"first_seconds": 3.1}, {}, {"first_seconds"}),
        ({"refresh_seconds": 0.51, "peak_bytes": 1.1e9}, {}, {"refresh_seconds", "peak_bytes"}),
        ({}, {"served": 1.011, "watched": 1.1}, {"slowdown, served", "slowdown, watched"}),
    ],
)
def test_a_target_is_met_or_missed_by_its_own_figure(
    changes: dict[str, float], ratio: dict[str, float], missed: set[str]
) -> None:
    met = targets_met({"stored": _STORED | changes, "live": {"ratio": ratio}})
    assert {name for name, reached in met.items() if not reached} == missed
    assert len(met) == 3 + len(ratio)


@pytest.mark.extended
@pytest.mark.skipif(not any(map(shutil.which, ("chromium", "google-chrome"))), reason="no Chromium is installed")
def test_a_dashboard_that_is_served_or_watched_answers_and_one_alone_is_not_there(tmp_path: Path) -> None:
    make_run(open_store(str(tmp_path / "live")), "live", Shape(steps=3))
    with serving(tmp_path) as address:
        posted = post_of_page(address)
    for name in ("served", "watched"):
        with looked_at(name, tmp_path, posted) as answered:
            deadline = time.monotonic() + _DEADLINE
            while answered() < 2:
                assert time.monotonic() < deadline, f"{name}: {answered()} answers"
                time.sleep(0.1)
    with looked_at("alone", tmp_path, posted) as answered:
        assert answered() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (("--trajectories", "0"), "at least 1000 trajectories"),
        (("--steps", "11"), "--steps is 11; expected at least two"),
    ],
)
def test_a_size_that_measures_nothing_is_refused_in_a_sentence(option: tuple[str, str], expected: str) -> None:
    command = [sys.executable, "-m", "benchmarks.dashboard", *option]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT)
    assert ended.returncode == 2
    assert expected in ended.stderr
