"""The state of a run, decided here from its stored records for every display.

attempts/<n>.ended ─► finished, stopped or failed      how the newest attempt ended
progress/*.json    ─► running or killed                without an end: is the controller or a stage still alive?
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from millrace.runs.record import AttemptEnd

State = Literal["running", "finished", "stopped", "failed", "killed"]
STATES: tuple[State, ...] = get_args(State)
KILLED_SECONDS = 20.0
"""A run without a recorded end counts as killed once its controller and stages have written nothing for this long."""
_KILLED = "no end was recorded and nothing of the run is alive: it was killed, or its machine is gone"
CONTROLLER = "controller"
"""The stage name in the status record that holds a controller's heartbeats."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run's newest attempt."""

    name: State
    """`stopped`: on request, after draining, or because the budget is spent. `failed`: by an error."""
    cause: str | None = None
    """The error of a failed run, or the evidence for a kill; None in other states."""


def run_state(end: AttemptEnd | None, t_started: float, records: Mapping[str, Mapping[str, Any]]) -> RunState:
    """The state of an attempt that started at `t_started` (unix seconds).

    `end` is what its controller recorded at its end, if anything; `records` are the attempt's status records.
    """
    if end is not None:
        return RunState(name=end.state, cause=end.cause)
    newest = max((record["t"] for record in records.values()), default=t_started)
    if time.time() - max(newest, t_started) < KILLED_SECONDS:
        return RunState(name="running")
    return RunState(name="killed", cause=_KILLED)


def of_attempt(number: int, records: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The status records that processes of this attempt wrote; also those of older runs, which name no attempt."""
    return {name: record for name, record in records.items() if record.get("attempt", number) == number}
