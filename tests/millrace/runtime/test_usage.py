"""What this process and its descendants use of the machine."""

import os
import subprocess
import sys
import time

from millrace.runtime.usage import ProcessTree, Usage

_BURN = "import os, sys, time\nblock = bytearray(64 << 20)\nprint('ready', flush=True)\nwhile True: sum(range(10000))"
_DEADLINE = 60.0


def used(tree: ProcessTree) -> Usage:
    """As of a moment later."""
    time.sleep(0.05)
    found = tree.look()
    assert found is not None
    return found


def test_work_of_a_child_of_a_child_counts_and_so_does_its_memory() -> None:
    tree = ProcessTree()
    before = used(tree).memory_bytes
    shell = f'exec 3>&1; {sys.executable} -c "{_BURN}" & echo $!; wait'
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        try:
            assert child.stdout.readline() == "ready\n"
            deadline = time.monotonic() + _DEADLINE
            while (now := used(tree)).cpu_cores < 0.05 or now.memory_bytes < before + (64 << 20):
                assert time.monotonic() < deadline, now
        finally:
            os.kill(grandchild, 9)


def test_time_of_a_child_that_has_ended_is_not_taken_back() -> None:
    tree = ProcessTree()
    subprocess.run([sys.executable, "-c", "for _ in range(200): sum(range(10000))"], check=True)
    assert used(tree).cpu_cores > 0
    assert used(tree).cpu_cores >= 0
