"""The frame around an attempt: heartbeats while it lasts, then a clean host and a record of its end.

with attempt_under_way ─► progress/controller-0, every 2 s ─► attempts/<n>.ended: stopped, or failed with its cause
                                                  killed ─► nothing more: `run_state` notices
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from millrace.errors import MillraceError
from millrace.runs.record import CONTROLLER, EndState, end_attempt
from millrace.runtime.heartbeat import HeartbeatPublisher
from storage.errors import StorageError
from storage.stores.base import Store
from tasks.fork_server import STAGES
from tasks.stop import STOP


@contextlib.contextmanager
def attempt_under_way(store: Store, attempt: int, handover: Path, doing: str) -> Iterator[HeartbeatPublisher]:
    """Publishes the controller's heartbeats; at the end stops the stages, removes `handover` and records the end.

    Stages on other hosts drain when a heartbeat says so, or when there are no more. An end that is recorded already
    stays.
    """
    how: EndState = "stopped"
    cause = None
    owner_id = str(attempt)
    try:
        with HeartbeatPublisher(
            store, CONTROLLER, 0, owner_id=owner_id, doing=doing, draining=STOP.is_set
        ) as heartbeats:
            try:
                yield heartbeats
            finally:
                STOP.set()
                STAGES.close()
                shutil.rmtree(handover, ignore_errors=True)
    # Ctrl-C, SIGTERM and Pause are each a BaseException: they stop the attempt.
    except Exception as error:
        how, cause = "failed", _sentence(error)
        raise
    finally:
        end_attempt(store, attempt, how, cause)


def _sentence(error: Exception) -> str:
    """The first line of the error; further lines may quote a log."""
    first = str(error).partition("\n")[0]
    return first if isinstance(error, MillraceError | StorageError) else f"{type(error).__name__}: {first}"
