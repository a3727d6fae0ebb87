"""What the Prefect UI shows of a running campaign besides its tasks: a progress bar, and a table at the end.

A thread looks at the store every few seconds and tells Prefect on a best-effort basis: the campaign neither waits for
the server nor fails with it.
"""

import contextvars
import logging
import threading
from types import TracebackType
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact

from flows.view import figures
from millrace.status import StatusReader
from storage.factory import open_store

_EVERY_SECONDS = 2.0
_LOGGER = logging.getLogger(__name__)


class Reporter:
    """Reports while its `with` block lasts."""

    def __init__(self, run_url: str) -> None:
        self._status = StatusReader(open_store(run_url))
        self._over = threading.Event()
        # In a copy of this context, or the artifacts would not belong to the flow run.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="reporter", daemon=True)

    def __enter__(self) -> "Reporter":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        # Not for ever: a server that is away must not hold the campaign's end up.
        self._thread.join(timeout=5)

    def _run(self) -> None:
        progress: Any = None
        shown = -1
        while True:
            over = self._over.wait(_EVERY_SECONDS)
            try:
                status = self._status.look()
                if progress is None:
                    progress = create_progress_artifact(0.0, key="campaign-progress", description="Optimizer steps")
                elif status["steps"] != shown:
                    shown = status["steps"]
                    update_progress_artifact(progress, 100.0 * shown / status["max_steps"])
                if over:
                    create_markdown_artifact(_table(status), key="campaign-summary", description="The run in figures")
            except Exception:
                # Whatever the server or the way to it does: the state of record is the run's own. What is wrong with
                # the run, its stages say.
                _LOGGER.debug("nothing was reported to Prefect", exc_info=True)
            if over:
                return


def _table(status: dict[str, Any]) -> str:
    """Key figures as a markdown table."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in figures(status))
    return f"| figure | value |\n|---|---|\n{rows}\n"
