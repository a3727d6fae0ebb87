"""How a stage process yields the processor to the others."""

import os
from contextlib import suppress
from pathlib import Path

_LOWEST = 19


def take_idle_time() -> None:
    """Lowers this process's priority, and that of all it starts later, for good: it gets what the others leave."""
    os.nice(_LOWEST)
    # Stages have a session each. Linux may share the processor between sessions first, and each session has a priority
    # of its own.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_LOWEST))
