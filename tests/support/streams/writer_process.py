"""`numbered_writer.py` as a process."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.stages.failpoints import Failpoints


@contextmanager
def running_writer(store: Path, process: str, how: str, failpoints: Failpoints) -> Iterator[subprocess.Popen[str]]:
    """A writer while it runs, its stdout a pipe; killed, if need be, when the block ends."""
    command = [sys.executable, str(Path(__file__).with_name("numbered_writer.py")), str(store), process, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=failpoints.environment()) as writer:
        try:
            yield writer
        finally:
            writer.kill()


def acknowledged(writer: subprocess.Popen[str]) -> int:
    """How much the writer said was committed; waits until it has ended."""
    assert writer.stdout is not None
    return max((int(line) for line in writer.stdout), default=0)
