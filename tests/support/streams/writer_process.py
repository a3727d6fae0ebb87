"""Writers as processes of their own: `tests/faults/numbered_writer.py` and `numbered_checkpoints.py`."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.stages.failpoints import Failpoints

FAULTS = Path(__file__).parents[2] / "faults"
ENDLESS = 100_000
"""More than a writer gets to before something happens to it."""


@contextmanager
def running_writer(store: Path, process: str, how: str, failpoints: Failpoints) -> Iterator[subprocess.Popen[str]]:
    """A writer while it runs, stdout a pipe; killed, if need be, when the block ends.

    `how` is `parts` or `grouped` for numbered rows, `checkpoints` for checkpoints.
    """
    script = FAULTS / ("numbered_checkpoints.py" if how == "checkpoints" else "numbered_writer.py")
    command = [sys.executable, str(script), str(store), process, str(ENDLESS), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=failpoints.environment()) as writer:
        try:
            yield writer
        finally:
            writer.kill()


def acknowledged(writer: subprocess.Popen[str]) -> int:
    """How much the writer said was committed; waits until it has ended."""
    assert writer.stdout is not None
    return max((int(line) for line in writer.stdout), default=0)
