"""A file that fills a small disk up to a few pages, so that a test chooses which write finds no room."""

import errno
import os
from pathlib import Path

PAGE = 4096
"""The unit of a tmpfs, bytes."""


class Ballast:
    """Fills the disk that is mounted at `disk` up to `free_pages` pages. For a disk whose unit is the page: a tmpfs."""

    def __init__(self, disk: Path, free_pages: int) -> None:
        self._file = disk / "ballast"
        self.leave_free(free_pages)

    def leave_free(self, pages: int) -> None:
        """Sizes the ballast so that exactly `pages` pages are free."""
        with self._file.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(PAGE))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        os.truncate(self._file, self._file.stat().st_size - pages * PAGE)

    def remove(self) -> None:
        self._file.unlink()
