"""The folder in shared memory where an attempt's weights pass from process to process."""

import hashlib
import shutil
from pathlib import Path

from storage.stores.memory import memory_folder


def handover_prefix(owner: str) -> str:
    """What the names of the folders of all attempts of `owner` begin with."""
    return f"handover-{hashlib.sha256(owner.encode()).hexdigest()[:16]}-"


def handover_folder(owner: str, attempt: int) -> Path:
    """An empty folder in shared memory for one attempt of `owner`, such as a run's URL.

    Removes what earlier attempts left behind, because a killed controller can't. Those of later attempts stay: the
    caller may be a controller that slept, whose run was resumed meanwhile. Remove the returned folder when done.
    """
    prefix = handover_prefix(owner)
    for found in memory_folder().glob(f"{prefix}*"):
        number = found.name.removeprefix(prefix)
        if number.isdecimal() and int(number) <= attempt:
            shutil.rmtree(found, ignore_errors=True)
    folder = memory_folder() / f"{prefix}{attempt}"
    folder.mkdir(mode=0o700)
    return folder
