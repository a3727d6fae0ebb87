"""The name of a campaign's flow run in the Prefect UI, and the message of its state Running.

    status ─┬─► name       `tiny-nightly, attempt 3`, once
            └─► message    `v142/150, reward 0.63`, at most every 15 s, and less often in a long attempt

Each message is a state in the server's database. An attempt of an hour writes at most 200, one of a week 700.
"""

import math
import time
from collections.abc import Callable
from typing import Any, Protocol
from uuid import UUID

from flows.display.key_figures import progress_line
from tasks.events import StateServer, show_running

MESSAGE_SECONDS = 15.0
"""Least time between two messages."""
_SHARE_OF_ATTEMPT = 0.01
"""Least time between two messages, as a share of the attempt's time so far."""


class HeaderServer(StateServer, Protocol):
    """The part of Prefect's client that names flow runs and sets their states."""

    def set_flow_run_name(self, flow_run_id: UUID, name: str) -> object: ...


class FlowRunHeader:
    """Name and message of one flow run. `clock` is a monotonic clock in seconds."""

    def __init__(self, server: HeaderServer, flow_run_id: UUID, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._flow_run_id = flow_run_id
        self._clock = clock
        self._named = False
        self._message = ""
        self._written = -math.inf

    def update(self, status: dict[str, Any]) -> None:
        """Shows the changes since the last call. Raises if the server can't be reached; the next call catches up."""
        if not self._named:
            name = f"{status['run_id']}, attempt {status['attempt']}"
            self._server.set_flow_run_name(self._flow_run_id, name)
            self._named = True
        message, now = progress_line(status), self._clock()
        pause = max(MESSAGE_SECONDS, _SHARE_OF_ATTEMPT * status["wall_seconds"])
        if status["state"] == "running" and message != self._message and now - self._written >= pause:
            # Noted first: a request that seemed to fail may have arrived.
            self._message, self._written = message, now
            show_running(self._server, self._flow_run_id, message)
