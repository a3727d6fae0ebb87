"""The end of a run in one file: summary.json, what `millrace status` says of a finished run."""

import json
from typing import Any

from millrace.run import end_attempt
from millrace.status import StatusReader
from storage import layout
from storage.factory import open_store


def write_summary(run_url: str, attempt: int) -> dict[str, Any]:
    """Marks the attempt finished, and writes and returns its status."""
    store = open_store(run_url)
    end_attempt(store, attempt, "finished")
    status = StatusReader(store).look()
    store.put(layout.SUMMARY, json.dumps(status, indent=1).encode())
    return status
