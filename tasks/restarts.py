"""How often a stage may die before it is given up.

supervise ─► at work ─► dies ─► keep_going: the third death within the window? ──no──► supervise, once more
                                                          └─yes─► given up: the campaign ends with its cause
"""

from collections import defaultdict
from typing import Any

from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from millrace.errors import InputError, LedgerMismatch
from storage.errors import Fenced
from tasks.stop import STOP

_MOST_DEATHS = 3
_WINDOW_SECONDS = 60.0


class Lives:
    """One stage task over all its restarts.

    A stage is given up at its third death within a window of time *at work*: from when it was ready until it died.
    So what imports and the loading of a model take does not matter: a stage that never gets ready is given up as well,
    though each try may last minutes. The window is 60 s, for a stage that died thrice in so short a time is not helped
    by another start, or 4 × hang_seconds where that is more: one that hangs again and again is at work for hang_seconds
    and a bit before each kill, so its first three deaths lie within 2 × hang_seconds and twice that bit.
    """

    def __init__(self) -> None:
        self.restarts = 0
        """How often it was started again."""
        self.cause = ""
        """Why it died last, a sentence."""
        self._window_seconds = _WINDOW_SECONDS
        self._at_work_seconds = 0.0
        # The time at work at each death.
        self._deaths: list[float] = []

    def lived(self, at_work_seconds: float, hang_seconds: float) -> None:
        """It was at work for so long since it was last started."""
        self._at_work_seconds += at_work_seconds
        self._window_seconds = max(_WINDOW_SECONDS, 4 * hang_seconds)

    def die(self, cause: str) -> bool:
        """Whether it is to be started again."""
        self.cause = cause
        self._deaths = [
            *(death for death in self._deaths if self._at_work_seconds - death < self._window_seconds),
            self._at_work_seconds,
        ]
        if len(self._deaths) >= _MOST_DEATHS:
            return False
        self.restarts += 1
        return True


_lives: dict[str, Lives] = defaultdict(Lives)


def lives_of(task_run_id: str) -> Lives:
    """Those of a stage task of this process, which keeps its id over its restarts."""
    return _lives[task_run_id]


def keep_going(task: Task[Any, Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Whether a stage that failed deserves another try.

    Not when the campaign ends, nor after a person's mistake; nor once another controller took the run over, for two
    that restart their stages would fence each other for ever. Nor where it dies again and again: see `Lives`.
    """
    error = state.result(raise_on_failure=False)
    if STOP.is_set() or isinstance(error, InputError | Fenced | LedgerMismatch):
        return False
    # Its first line says what happened; a log's last lines follow.
    return lives_of(str(task_run.id)).die(str(error).partition("\n")[0])
