"""Damage at rest is found when it is read, and named; it never becomes a wrong value or a crash.

The storms run in a process of their own (`support/damage/storm.py`): damage can crash an Arrow parser.
"""

import json
import subprocess
import sys

import pytest
from support.damage import storm as storm_script

SEEDS = (0,)
KINDS = {"record detected", "part detected", "file detected", "mark detected", "hint unchanged"}


def storm(*arguments: object) -> dict[str, int]:
    """The counts of a storm that ended without a failure; both are printed."""
    command = [sys.executable, storm_script.__file__, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, f"the storm {arguments} crashed with {ended.returncode}:\n{ended.stderr}"
    result = json.loads(ended.stdout)
    print(f"storm {arguments}: {result['counts']}, {len(result['failures'])} failures")
    assert result["failures"] == []
    return result["counts"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.faults)])
def test_every_flipped_bit_is_named_or_lies_in_a_hint_and_changes_nothing(count: int, seed: int) -> None:
    counts = storm("flips", seed, count)
    assert set(counts) == KINDS
    assert sum(counts.values()) == count


@pytest.mark.slow
def test_every_cut_object_is_named_or_is_a_hint_and_changes_nothing(seed: int) -> None:
    counts = storm("cuts", seed)
    assert set(counts) == KINDS
    assert min(counts.values()) > 100
