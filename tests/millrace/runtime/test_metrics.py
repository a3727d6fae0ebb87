"""A stage's pace, and what this process and its descendants use of the machine."""

import os
import subprocess
import sys
import time

from millrace.runtime.metrics import Pace, ProcessTree

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
