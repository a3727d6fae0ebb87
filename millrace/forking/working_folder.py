"""Where a user's own modules are found: in the working folder, by every process."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def working_folder_first() -> Iterator[None]:
    """Finds modules in the working folder first, as stages do: `python -m` adds it, a console script does not."""
    before = list(sys.path)
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path[:] = before
