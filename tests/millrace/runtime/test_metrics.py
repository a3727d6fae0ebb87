"""A stage's pace, and what this process and its descendants use of the machine."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import pairwise

from millrace.runtime.metrics import MOST_POINTS, Pace, ProcessTree, RewardCurve, extend_curve

_BURN = "import os, sys, time\nblock = bytearray(64 << 20)\nprint('ready', flush=True)\nwhile True: sum(range(10000))"
_DEADLINE = 60.0


def test_the_first_step_only_starts_the_clock() -> None:
    ends = iter((100.0, 103.0, 108.0))
    pace = Pace(lambda: next(ends))
    assert pace.step(50) == {}, "it waited for the pipeline to fill"
    assert pace.step(60) == {"step_seconds": 3.0, "tokens_per_second": 20.0}
    assert pace.step(100) == {"step_seconds": 4.0, "tokens_per_second": 20.0}


def look_later(tree: ProcessTree) -> tuple[float, int]:
    time.sleep(0.05)
    return tree.look()


def test_cpu_and_memory_of_a_grandchild_count() -> None:
    tree = ProcessTree()
    _, memory = look_later(tree)
    shell = f'exec 3>&1; {sys.executable} -c "{_BURN}" & echo $!; wait'
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        try:
            assert child.stdout.readline() == "ready\n"
            deadline = time.monotonic() + _DEADLINE
            while (now := look_later(tree))[0] < 0.05 or now[1] < memory + (64 << 20):
                assert time.monotonic() < deadline, now
        finally:
            os.kill(grandchild, 9)


def test_cpu_time_of_an_ended_child_is_kept() -> None:
    tree = ProcessTree()
    subprocess.run([sys.executable, "-c", "for _ in range(200): sum(range(10000))"], check=True)
    assert look_later(tree)[0] > 0
    assert look_later(tree)[0] >= 0


def curve_of(versions: Iterable[int], curve: RewardCurve) -> RewardCurve:
    for version in versions:
        curve = extend_curve(curve, version, 0.01 * version)
        assert len(curve) <= MOST_POINTS
    return curve


def test_a_curve_of_rewards_has_few_points_spread_over_the_whole_run() -> None:
    assert curve_of(range(1, 4), []) == [[1, 0.01], [2, 0.02], [3, 0.03]]
    versions = [version for version, _ in curve_of(range(1, 1002), [])]
    assert len(versions) > MOST_POINTS / 2
    assert (versions[0], versions[-1]) == (16, 1001)
    assert {after - before for before, after in pairwise(versions[:-1])} == {16}


def test_a_curve_goes_back_with_the_trainer() -> None:
    curve = extend_curve(curve_of(range(1, 9), []), 5, 1.0)
    assert curve == [[1, 0.01], [2, 0.02], [3, 0.03], [4, 0.04], [5, 1.0]]
