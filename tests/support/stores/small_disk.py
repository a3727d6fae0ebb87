"""A disk that fills up: a file system in memory, of a few megabytes, mounted for one test."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NotMounted(Exception):
    """This user, or this machine, may not mount; the message says what `mount` said."""


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """`folder`, made and with room for `megabytes` MiB in it. Raises NotMounted."""
    folder.mkdir()
    mount_tmpfs(folder, f"size={megabytes}m")
    try:
        yield folder
    finally:
        # Lazily: a test's leftover process or mapping may still hold a file.
        subprocess.run(["umount", "--lazy", folder], check=True)


def make_read_only(disk: Path) -> None:
    """Makes the small disk `disk` read-only, for root too."""
    mount_tmpfs(disk, "remount,ro")


def mount_tmpfs(folder: Path, options: str) -> None:
    """Raises NotMounted."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NotMounted("there is no `mount` here") from None
    if ended.returncode != 0:
        raise NotMounted(ended.stderr.strip())
