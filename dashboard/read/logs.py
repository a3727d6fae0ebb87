"""The ends of the logs of a run's processes."""

import re
from collections.abc import Collection

from dashboard.read.tokens import visible
from storage import layout
from storage.errors import StorageError
from storage.stores.factory import open_store

LINES = 20
"""Lines read of each log."""
_BYTES, _CHARACTERS, _MOST_LOGS = 16 << 10, 400, 64
"""Limits on the end of a log, on a line, and on the number of logs."""
_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")


def log_ends(url: str, expected: Collection[str]) -> dict[str, str]:
    """Returns the last lines of each log of the run at `url`, by `<stage>-<replica>`; invisible characters are escaped.

    A log that is empty, and an `expected` one that does not exist, is ''. A log that can't be read says so.
    """
    ends = dict.fromkeys(sorted(expected), "")
    try:
        store = open_store(url)
        for entry in store.entries(layout.LOGS)[:_MOST_LOGS]:
            name = visible(entry.path.removeprefix(f"{layout.LOGS}/").removesuffix(".log"))
            try:
                data = bytes(store.get(entry.path, max(0, entry.bytes - _BYTES), _BYTES))
                lines = _COLOUR.sub(b"", data).decode("utf-8", "replace").splitlines()
                ends[name] = "\n".join(visible(line[:_CHARACTERS]) for line in lines[-LINES:])
            except (StorageError, OSError) as error:
                ends[name] = f"It can't be read: {visible(str(error))}"
    except (StorageError, OSError) as error:
        ends["all"] = f"The logs can't be listed: {visible(str(error))}"
    return ends
