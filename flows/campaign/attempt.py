"""The frame around an attempt: a folder in shared memory, heartbeats while it lasts, then a record of its end.

with attempt_under_way ─► progress/controller-0, every 2 s ─► attempts/<n>.ended: stopped, or failed with its cause
                                                  killed ─► nothing more: `run_state` notices
"""

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from millrace.errors import MillraceError
from millrace.runs.record import CONTROLLER, EndState, end_attempt
from millrace.runtime.heartbeat import HeartbeatPublisher
from storage.errors import StorageError
from storage.stores.base import Store
from storage.stores.memory import memory_folder
from tasks.fork_server import STAGES
from tasks.stop import STOP


def handover_prefix(owner: str) -> str:
    """What the names of the folders of all attempts of `owner` begin with."""
    return f"handover-{hashlib.sha256(owner.encode()).hexdigest()[:16]}-"


def handover_folder(owner: str, attempt: int) -> Path:
    """An empty folder in shared memory for the weights of one attempt of `owner`, such as a run's URL.

    Removes what earlier attempts left behind, because a killed controller can't. Those of later attempts stay: the
    caller may be a controller that slept, whose run was resumed meanwhile. Remove the returned folder when done.
    """
    prefix = handover_prefix(owner)
    for former in memory_folder().glob(f"{prefix}*"):
        number = former.name.removeprefix(prefix)
        if number.isdecimal() and int(number) <= attempt:
            shutil.rmtree(former, ignore_errors=True)
    folder = memory_folder() / f"{prefix}{attempt}"
    folder.mkdir(mode=0o700)
    return folder


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
