"""Freed memory is used again."""

import ctypes
import subprocess
import sys

import pytest

# Eight blocks at a time: glibc itself would keep two.
_FAULTS = """
import resource, sys
from millrace.forking.process_settings import keep_freed_memory
if "keep" in sys.argv:
    keep_freed_memory()
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * (4 << 20) for _ in range(8)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_memory_that_was_freed_is_used_again_without_a_page_fault() -> None:
    plain, kept = (
        int(subprocess.run([sys.executable, "-c", _FAULTS, mode], check=True, capture_output=True, text=True).stdout)
        for mode in ("", "keep")
    )
    assert plain > 1000
    assert kept < 100
