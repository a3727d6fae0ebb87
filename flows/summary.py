"""The end of an attempt in one file: summary.json, what `millrace status` says of the run then."""

import json
from typing import Any

from millrace.run import end_attempt
from millrace.status import StatusReader
from storage import layout
from storage.factory import open_store


def write_summary(run_url: str, attempt: int) -> dict[str, Any]:
    """Marks the attempt finished, or stopped where there are steps left to take; writes and returns the status."""
    store = open_store(run_url)
    reader = StatusReader(store)
    status = reader.look()
    end_attempt(store, attempt, "finished" if status["steps"] >= status["max_steps"] else "stopped")
    status = reader.look()
    store.put(layout.SUMMARY, json.dumps(status, indent=1).encode())
    return status
