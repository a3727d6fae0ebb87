"""What a diagnosis asks the machine, and the lines that it makes of the answers. Tests script the answers."""

import http.client
import os
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import psutil

from configs.generation import multiplies_bfloat16

_ANSWER_SECONDS = 1.0
_COMMAND_SECONDS = 10.0
State = Literal["ok", "wrong", "absent"]
"""`absent`: not there, and nothing is wrong with that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Something about this machine, and what to do about it."""

    group: str
    """Heading: `host`, `packages`, `storage`, `network` or `GPUs`."""
    what: str
    """What was looked at."""
    found: str
    """What it is."""
    state: State
    needed: bool = False
    """Whether a campaign on CPUs can't do without."""
    remedy: str = ""
    """What to do about it, in one sentence; empty if it is fine."""

    @property
    def stops_campaigns(self) -> bool:
        """Whether a campaign on CPUs fails because of this."""
        return self.needed and self.state != "ok"


def needed(group: str, what: str, found: str, *, fine: bool = True, remedy: str = "") -> Line:
    """The line of something that a campaign on CPUs can't do without; the remedy is shown where it is not fine."""
    state: State = "ok" if fine else "wrong"
    return Line(group=group, what=what, found=found, state=state, needed=True, remedy="" if fine else remedy)


class TorchDevices(NamedTuple):
    """The GPUs that torch can use."""

    names: tuple[str, ...]
    peers: tuple[tuple[int, int], ...]
    """Ordered pairs of which the first reads the second's memory."""
    nccl: str
    """Version, empty if torch has no NCCL."""


class Machine:
    """This machine. Nothing raises; what can't be found out is None or empty."""

    def environment(self, name: str) -> str:
        """An environment variable, empty if it is not set."""
        return os.environ.get(name, "")

    def python(self) -> tuple[int, int, int]:
        """This interpreter's version."""
        return sys.version_info[:3]

    def cores(self) -> int:
        """Cores that this process may use."""
        return len(os.sched_getaffinity(0))

    def multiplies_bfloat16(self) -> str | None:
        """What multiplies bfloat16: `GPU` or a flag of the CPU; None if it is emulated."""
        return multiplies_bfloat16()

    def available_memory(self) -> int:
        """Bytes that new processes can have without swapping, within this process's cgroup."""
        free = psutil.virtual_memory().available
        try:
            limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        except (OSError, ValueError):
            return free
        return min(free, limit - used)

    def room(self, folder: Path) -> int:
        """Free bytes of the file system of `folder`, or of the nearest folder above that exists; 0 if unknown."""
        try:
            return shutil.disk_usage(existing(folder)).free
        except OSError:
            return 0

    def is_writable(self, folder: Path) -> bool:
        """Whether files can be created in `folder`."""
        return folder.is_dir() and os.access(folder, os.W_OK)

    def open_files(self) -> int:
        """Limit of open files per process that a process may set for itself."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def has_library(self, name: str) -> bool:
        """Whether the shared library `name` can be loaded."""
        import ctypes

        try:
            ctypes.CDLL(name)
        except OSError:
            return False
        return True

    def installed(self, package: str) -> str | None:
        """Version of an installed distribution."""
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    def requirements(self) -> list[str]:
        """What Millrace requires of other distributions, extras included."""
        try:
            return requires("millrace") or []
        except PackageNotFoundError:
            return []

    def run(self, *command: str) -> str | None:
        """What `command` prints; None if there is no such command, or if it fails."""
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return ran.stdout

    def has_command(self, name: str) -> bool:
        """Whether the shell would find a command of this name."""
        return shutil.which(name) is not None

    def names_in(self, folder: Path) -> list[str]:
        """Names in a folder, sorted; none if it does not exist."""
        try:
            return sorted(path.name for path in folder.iterdir())
        except OSError:
            return []

    def can_listen(self, port: int) -> bool:
        """Whether a server could listen on this port of loopback; 0 stands for any free one."""
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                return False
        return True

    def answers(self, url: str) -> bool:
        """Whether a Prefect server answers at the API's `url` within a second."""
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        try:
            connection = kind(parts.hostname or "", parts.port, timeout=_ANSWER_SECONDS)
            try:
                connection.request("GET", f"{parts.path.rstrip('/')}/health")
                return connection.getresponse().status == http.client.OK
            finally:
                connection.close()
        except (OSError, ValueError, http.client.HTTPException):
            return False

    def torch_devices(self) -> TorchDevices:
        """What torch sees. Importing it takes seconds: ask only where there are GPUs."""
        import torch

        count = torch.cuda.device_count()
        pairs = ((one, other) for one in range(count) for other in range(count) if one != other)
        return TorchDevices(
            names=tuple(torch.cuda.get_device_name(one) for one in range(count)),
            peers=tuple(pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)),
            nccl=".".join(map(str, torch.cuda.nccl.version())) if count else "",  # type: ignore[no-untyped-call]
        )


def existing(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that exists."""
    whole = folder.absolute()
    return next(path for path in (whole, *whole.parents) if path.is_dir())
