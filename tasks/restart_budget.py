"""How often a stage may die before the campaign gives it up.

supervise ─► at work ─► dies ─► keep_going: the third death within the window? ──no──► supervise again
                                                          └─yes─► given up: the campaign ends with its cause
"""

from collections import defaultdict
from typing import Any

from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import task_run
from prefect.tasks import Task

from millrace.errors import FINAL, RolledBack
from tasks.events import emit
from tasks.stop import STOP

_MAX_DEATHS = 3
_WINDOW_SECONDS = 60.0


class RestartBudget:
    """The restarts of one stage task.

    A stage is given up at its third death within a window of time *at work*: from when it was ready until it died.
    Imports and loading the model do not count, so a stage that never becomes ready is given up as well, even if each
    try lasts minutes. The window is 60 s, or 4 × hang_seconds if that is longer: a stage that keeps hanging is at work
    for a little over hang_seconds before each kill, so its first three deaths are a little over 2 × hang_seconds apart.
    """

    def __init__(self) -> None:
        self.restarts = 0
        self.cause = ""
        """The cause of the last death, one sentence."""
        self._window_seconds = _WINDOW_SECONDS
        self._at_work_seconds = 0.0
        # The time at work at each death.
        self._deaths: list[float] = []

    def add_work(self, at_work_seconds: float, hang_seconds: float) -> None:
        """Adds the time at work since the last start."""
        self._at_work_seconds += at_work_seconds
        self._window_seconds = max(_WINDOW_SECONDS, 4 * hang_seconds)

    def record_death(self, cause: str) -> bool:
        """Returns whether the stage should be restarted."""
        self.cause = cause
        recent = [death for death in self._deaths if self._at_work_seconds - death < self._window_seconds]
        self._deaths = [*recent, self._at_work_seconds]
        if len(self._deaths) >= _MAX_DEATHS:
            return False
        self.restarts += 1
        return True


_budgets: dict[str, RestartBudget] = defaultdict(RestartBudget)


def own_budget(stage: str, run_url: str) -> RestartBudget:
    """The budget of the current task run, which supervises `stage`. Reports that the stage is restarted, if it is.

    A task run keeps its id when it is retried.
    """
    budget = _budgets[str(task_run.id)]
    if budget.restarts:
        emit("stage.restarted", run_url, {"stage": stage, "cause": budget.cause, "restarts": budget.restarts})
    return budget


def keep_going(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    """Decides whether a failed stage gets another try; Prefect's `retry_condition_fn`.

    It gets none when the campaign is ending, after an error that only a person can fix, once another controller has
    taken over the run (two controllers restarting stages would fence each other for ever), or if it keeps dying.
    """
    error = state.result(raise_on_failure=False)
    if STOP.is_set() or isinstance(error, FINAL):
        return False
    if isinstance(error, RolledBack):
        # The trainer itself limits how often; this does not count as a death.
        return True
    # The first line names the cause; the end of the log follows.
    return _budgets[str(run.id)].record_death(str(error).partition("\n")[0])
