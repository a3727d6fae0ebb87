"""The record of a run: how it was started, every later start of its controller, and the state of the newest one.

run.json              the first start, attempt 0: run id, config, time, versions, code commit; claims the run's folder
attempts/0001.json    each later start: the same, with the few keys that may change on resume
attempts/<n>.ended    how that attempt ended, and why if it failed; missing if its controller was killed
progress/*.json       without an end: is the controller or a stage still alive? running, or killed
note.txt              a person's note on the run, one line; no stage reads it
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from configs.stored import changed_keys, staleness_bound
from millrace.errors import InputError, RunExists, RunMissing
from millrace.runs.provenance import Origin, Provenance, provenance
from storage import layout
from storage.checkpoints import read_latest
from storage.errors import NotInStore, StreamCorrupt
from storage.json_text import RESTORE, parse_as
from storage.stores.base import Store

CONTROLLER = "controller"
"""The stage name in the status record that holds a controller's heartbeats."""
KILLED_SECONDS = 20.0
"""A run without a recorded end counts as killed once its controller and stages have written nothing for this long."""
MAX_NOTE_CHARACTERS = 500
EndState = Literal["finished", "stopped", "failed"]
"""`stopped`: drained, because a person asked or the budget is spent. `failed`: by an error."""
State = Literal["running", "finished", "stopped", "failed", "killed"]
STATES: tuple[State, ...] = get_args(State)


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
    provenance: Provenance
    """The controller's process."""
    origin: Origin = field(default_factory=Origin)
    """The preset, the defaults and the Prefect page."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Content hash of each file, function and package that the config names; also those of earlier starts."""

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


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended, as its controller recorded it."""

    state: EndState
    cause: str | None = None
    """The error, if it failed."""
    t: float = field(default=0.0, compare=False)
    """Unix seconds."""


def create_run(
    store: Store,
    run_id: str,
    config: dict[str, Any],
    origin: Origin | None = None,
    inputs: Mapping[str, str] | None = None,
) -> Attempt:
    """Claims the run's folder. Raises RunExists, also if another controller claims it at the same time."""
    attempt = _start(config, origin, number=0, inputs=dict(inputs or {}))
    if not _claim(store, layout.RUN, {"run_id": run_id, **asdict(attempt)}):
        raise RunExists(
            f"run {run_id!r} exists already", file=store.url, expected="another --run-id, or --resume to continue it"
        )
    return attempt


def resume_run(
    store: Store,
    config: dict[str, Any],
    origin: Origin | None = None,
    inputs: Mapping[str, str] | None = None,
) -> Attempt:
    """Records another start of an existing run.

    Raises StreamCorrupt if its log of checkpoints is damaged, or something else has the name of the record.
    """
    previous, inputs = latest_attempt(store), inputs or {}
    checkpoint = read_latest(store)
    number = previous.number
    while True:
        number += 1
        attempt = _start(
            config,
            origin,
            number=number,
            first_step=0 if checkpoint is None else checkpoint.step,
            changes=[*changed_keys(previous.config, config), *changed_inputs(previous, inputs)],
            inputs={**previous.inputs, **inputs},
        )
        if _claim(store, layout.attempt(number), asdict(attempt)):
            return attempt


def _start(config: dict[str, Any], origin: Origin | None, **values: Any) -> Attempt:
    made_by = provenance(config)
    return Attempt(config=config, t_started=time.time(), provenance=made_by, origin=origin or Origin(), **values)


def changed_inputs(previous: Attempt, inputs: Mapping[str, str]) -> list[str]:
    """One sentence per input that holds something else than in the starts up to `previous`."""
    old = previous.inputs
    return [f"{name} was {old[name]} and is {now}" for name, now in inputs.items() if old.get(name, now) != now]


def _claim(store: Store, path: str, values: dict[str, Any]) -> bool:
    """Whether `path` is ours now. An existing record may be our own, from a try whose reply was lost."""
    record = json.dumps(values, indent=1, sort_keys=True).encode()
    if store.put_if_absent(path, record):
        return True
    try:
        return bytes(store.get(path)) == record
    except NotInStore as error:
        raise StreamCorrupt(path, f"something other than a file has its name; remove it, or {RESTORE}") from error


def read_run(store: Store) -> dict[str, Any]:
    """`run.json`. Raises RunMissing, and StreamCorrupt for an invalid record."""
    try:
        record = parse_as(dict[str, Any], bytes(store.get(layout.RUN)), layout.RUN)
    except NotInStore as error:
        raise RunMissing("no run", file=store.url, expected=f"{layout.RUN} there") from error
    check_run_id(record)
    return record


def check_run_id(record: dict[str, Any]) -> None:
    """Raises StreamCorrupt unless `run.json` with this content names its run."""
    if not isinstance(record.get("run_id"), str):
        raise StreamCorrupt(layout.RUN, f"it names no run_id; {RESTORE}")


def read_attempt(store: Store, number: int) -> Attempt:
    """Attempt `number`. Raises RunMissing, NotInStore, and StreamCorrupt for an invalid record."""
    if number == 0:
        return parse_attempt(read_run(store), layout.RUN)
    return parse_attempt(bytes(store.get(layout.attempt(number))), layout.attempt(number))


def parse_attempt(data: bytes | dict[str, Any], path: str) -> Attempt:
    """The attempt in the file `path`. Raises StreamCorrupt."""
    values = parse_as(dict[str, Any], data, path)
    return parse_as(Attempt, {name: value for name, value in values.items() if name != "run_id"}, path)


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


def end_attempt(store: Store, number: int, state: EndState, cause: str | None = None) -> None:
    """Records that an attempt's controller exits; `cause`: why it failed. An end that is recorded already stays."""
    end = AttemptEnd(state=state, cause=cause, t=time.time())
    store.put_if_absent(layout.ended(number), json.dumps(asdict(end)).encode())


def read_end(store: Store, number: int) -> AttemptEnd | None:
    """How an attempt ended; None if it still runs or was killed, and if the file can't be read."""
    try:
        return parse_as(AttemptEnd, bytes(store.get(layout.ended(number))), layout.ended(number))
    except (NotInStore, StreamCorrupt):
        return None


def run_state(
    end: AttemptEnd | None, t_started: float, records: Mapping[str, Mapping[str, Any]]
) -> tuple[State, str | None]:
    """The state of an attempt that started at `t_started` (unix seconds), and the cause of a failure or kill.

    `end` is what its controller recorded at its end, if anything; `records` are the attempt's status records.
    """
    if end is not None:
        return end.state, end.cause
    newest = max([t_started, *(record["t"] for record in records.values())])
    if time.time() - newest < KILLED_SECONDS:
        return "running", None
    return "killed", "no end was recorded and nothing of the run is alive: it was killed, or its machine is gone"


def of_attempt(number: int, records: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The status records that processes of this attempt wrote, the controller's and hosts' included."""
    return {name: record for name, record in records.items() if record.get("attempt", number) == number}


def read_note(store: Store) -> str:
    """The note on the run in `store`; '' if there is none. Raises the store's errors."""
    try:
        data = bytes(store.get(layout.NOTE, 0, 4 * MAX_NOTE_CHARACTERS))
    except NotInStore:
        return ""
    # Someone may have written it by hand.
    return " ".join(data.decode("utf-8", "replace").split())[:MAX_NOTE_CHARACTERS]


def write_note(store: Store, text: str) -> None:
    """Replaces the note on the run in `store`; an empty one removes it. Line breaks become spaces.

    Raises RunMissing without a run, and InputError for more than 500 characters.
    """
    read_run(store)
    line = " ".join(text.split())
    if len(line) > MAX_NOTE_CHARACTERS:
        expected = f"at most {MAX_NOTE_CHARACTERS}"
        raise InputError(f"of {len(line)} characters", key="the note", expected=expected)
    if line:
        store.put(layout.NOTE, line.encode("utf-8", "replace"))
    else:
        store.delete(layout.NOTE)
