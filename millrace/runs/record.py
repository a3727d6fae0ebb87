"""The record of a run: how it was started, every later start of its controller, and the state of the newest one.

run.json              the first start, attempt 0: run id, config, time, versions, code commit; claims the run's folder
attempts/0001.json    each later start: the same, with the few keys that may change on resume
attempts/<n>.ended    how that attempt ended, and why if it failed; missing if its controller was killed
progress/*.json       without an end: is the controller or a stage still alive? running, or killed
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from configs.stored import changed_keys, staleness_bound
from millrace.errors import RunExists, RunMissing
from millrace.runs.provenance import Origin, Provenance, parse_origin, provenance
from storage import layout
from storage.checkpoints import read_latest
from storage.errors import NotInStore, StreamCorrupt
from storage.json_text import parse_json
from storage.stores.base import Store

RESTORE = "restore this file from a copy of the run"
"""What to do about a damaged record."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run's controller."""

    number: int
    """From 0; unique in the run."""
    config: dict[str, Any]
    """The resolved config, as JSON."""
    t_started: float
    """Unix seconds."""
    first_step: int = 0
    """Policy version of the checkpoint it resumed from."""
    changes: list[str] = field(default_factory=list)
    """Settings that differ from those of the start before it, and inputs whose change was accepted, a sentence each."""
    provenance: Provenance = field(default_factory=provenance)
    """The controller's process."""
    origin: Origin = field(default_factory=Origin)
    """The preset and the Prefect page."""
    inputs: dict[str, str] = field(default_factory=dict)
    """What each file, function and package that the config names held, by name; also those of earlier starts."""

    @property
    def path(self) -> str:
        """The file of its record, relative to the run."""
        return layout.RUN if self.number == 0 else layout.attempt(self.number)

    @property
    def stop_at_step(self) -> int:
        """Policy version at which its trainer ends: `training.max_steps`, or earlier because of `budget.max_steps`."""
        max_steps: int = self.config["training"]["max_steps"]
        budget = self.config.get("budget", {}).get("max_steps")
        return max_steps if budget is None else min(max_steps, self.first_step + budget)

    @property
    def max_staleness(self) -> int:
        """The staleness bound in force, policy versions."""
        return staleness_bound(self.config["pipeline"]["mode"], int(self.config["staleness"]["max_staleness"]))


_UNKNOWN = Origin()
EndState = Literal["finished", "stopped", "failed"]
"""`stopped`: drained, because a person asked or the budget is spent."""


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended, as its controller recorded it."""

    state: EndState
    cause: str | None = None
    """The error, if it failed."""


def create_run(
    store: Store,
    run_id: str,
    config: dict[str, Any],
    origin: Origin = _UNKNOWN,
    inputs: Mapping[str, str] = MappingProxyType({}),
) -> Attempt:
    """Claims the run's folder. Raises RunExists, also if another controller claims it at the same time."""
    attempt = Attempt(
        number=0,
        config=config,
        t_started=time.time(),
        provenance=provenance(config),
        origin=origin,
        inputs=dict(inputs),
    )
    if not _claim(store, layout.RUN, _dump({"run_id": run_id, **asdict(attempt)})):
        raise RunExists(f"run {run_id!r} exists already at {store.url}: choose another --run-id, or add --resume")
    return attempt


def resume_run(
    store: Store,
    config: dict[str, Any],
    origin: Origin = _UNKNOWN,
    inputs: Mapping[str, str] = MappingProxyType({}),
) -> Attempt:
    """Records another start of an existing run.

    Raises StreamCorrupt if its log of checkpoints is damaged, or something else has the name of the record.
    """
    before = latest_attempt(store)
    number = before.number
    changes = [*changed_keys(before.config, config), *changed_inputs(before, inputs)]
    checkpoint = read_latest(store)
    first_step = 0 if checkpoint is None else checkpoint.step
    made_by = provenance(config)
    while True:
        number += 1
        attempt = Attempt(
            number=number,
            config=config,
            t_started=time.time(),
            first_step=first_step,
            changes=changes,
            provenance=made_by,
            origin=origin,
            inputs={**before.inputs, **inputs},
        )
        if _claim(store, layout.attempt(number), _dump(asdict(attempt))):
            return attempt


def changed_inputs(before: Attempt, inputs: Mapping[str, str]) -> list[str]:
    """One sentence per input that holds something else than in the starts up to `before`."""
    old = before.inputs
    return [f"{name} was {old[name]} and is {now}" for name, now in inputs.items() if old.get(name, now) != now]


def _claim(store: Store, path: str, record: bytes) -> bool:
    """Whether `path` is ours now. An existing record may be our own, from a try whose reply was lost."""
    if store.put_if_absent(path, record):
        return True
    try:
        return bytes(store.get(path)) == record
    except NotInStore as error:
        raise StreamCorrupt(path, f"something that is no file has its name; remove it, or {RESTORE}") from error


def read_run(store: Store) -> dict[str, Any]:
    """`run.json`. Raises RunMissing, and StreamCorrupt for what is no record of a run."""
    try:
        record = _read_object(store, layout.RUN)
    except NotInStore as error:
        raise RunMissing(f"no run at {store.url}: expected {layout.RUN} there") from error
    check_run_id(record)
    return record


def check_run_id(record: dict[str, Any]) -> None:
    """Raises StreamCorrupt unless `run.json` with this content names its run."""
    if not isinstance(record.get("run_id"), str):
        raise StreamCorrupt(layout.RUN, f"it names no run_id; {RESTORE}")


def read_attempt(store: Store, number: int) -> Attempt:
    """Attempt `number`. Raises RunMissing or NotInStore, and StreamCorrupt for what is no record of an attempt."""
    path = layout.RUN if number == 0 else layout.attempt(number)
    return parse_attempt(read_run(store) if number == 0 else _read_object(store, path), path)


def parse_attempt(values: dict[str, Any], path: str) -> Attempt:
    """The attempt in the JSON object `values` of the file `path`. Raises StreamCorrupt."""
    values = {name: value for name, value in values.items() if name != "run_id"}
    try:
        made_by, origin = Provenance(**values["provenance"]), parse_origin(values["origin"])
        attempt = Attempt(**{**values, "provenance": made_by, "origin": origin})
    except (KeyError, TypeError) as error:
        raise StreamCorrupt(path, f"not the record of an attempt: {error}; {RESTORE}") from error
    if not isinstance(attempt.config, dict) or type(attempt.number) is not int or type(attempt.first_step) is not int:
        raise StreamCorrupt(path, f"not the record of an attempt: expected a config and whole numbers; {RESTORE}")
    return attempt


def _read_object(store: Store, path: str) -> dict[str, Any]:
    try:
        values = parse_json(bytes(store.get(path)))
    except ValueError as error:
        raise StreamCorrupt(path, f"not JSON: {error}; {RESTORE}") from error
    if not isinstance(values, dict):
        raise StreamCorrupt(path, f"not a JSON object; {RESTORE}")
    return values


def latest_attempt(store: Store) -> Attempt:
    """The newest start. Raises RunMissing."""
    number = 0
    while store.exists(layout.attempt(number + 1)):
        number += 1
    return read_attempt(store, number)


def attempt_of_step(store: Store, step: int) -> Attempt:
    """The start in which the surviving policy version `step` was made. Raises RunMissing.

    If the newest checkpoint was damaged and the trainer resumed from an older one, the steps in between count for the
    earlier start.
    """
    attempt = latest_attempt(store)
    # Versions above a start's first_step were made in that start or a later one.
    while attempt.number > 0 and attempt.first_step >= step:
        attempt = read_attempt(store, attempt.number - 1)
    return attempt


def end_attempt(store: Store, number: int, how: EndState, cause: str | None = None) -> None:
    """Records that an attempt's controller exits; `cause`: why it failed. An end that is recorded already stays."""
    record = {"state": how, "cause": cause, "t": time.time()}
    store.put_if_absent(layout.ended(number), json.dumps(record).encode())


def read_end(store: Store, number: int) -> AttemptEnd | None:
    """How an attempt ended; None if it still runs or was killed, and if the file can't be read."""
    try:
        return parse_end(bytes(store.get(layout.ended(number))), layout.ended(number))
    except (NotInStore, StreamCorrupt):
        return None


def parse_end(data: bytes, path: str) -> AttemptEnd:
    """How an attempt ended, by the file `path` with the content `data`. Raises StreamCorrupt."""
    try:
        record = parse_json(data)
        state, cause = record["state"], record.get("cause")
    except (ValueError, KeyError, TypeError) as error:
        raise StreamCorrupt(path, f"it does not say how the attempt ended: {error!r}") from error
    if state not in get_args(EndState):
        raise StreamCorrupt(path, f"it says that the attempt ended {state!r}; expected {', '.join(get_args(EndState))}")
    return AttemptEnd(state=state, cause=None if cause is None else str(cause))


def _dump(record: dict[str, Any]) -> bytes:
    return json.dumps(record, indent=1, sort_keys=True).encode()


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
    """The status records that processes of this attempt wrote, the controller's and hosts' included."""
    return {name: record for name, record in records.items() if record.get("attempt", number) == number}
