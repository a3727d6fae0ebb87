"""Leases on a host's GPUs: a lock on a file per GPU, held by the process that supervises the stages.

    campaign, or the job of a work pool ─► free GPUs ─► `assign` ─► locked until its stages have ended

The kernel releases the locks of a process that dies. The files are in this user's folder in memory and have the GPUs'
UUIDs as names, so campaigns, jobs and replays of a user on one machine never share a GPU. Containers, which count their
GPUs from 0 each, may share the folder.
"""

import contextlib
import fcntl
import time
from collections.abc import Iterable, Iterator
from typing import TextIO

from configs.schema import RunConfig
from millrace.doctor.driver import query_gpus
from millrace.errors import DevicesInUse, PlaceYielded
from millrace.runtime.devices import Assignment, Process, assign, host_devices, may_use_devices
from storage.stores.memory import memory_folder
from tasks.stop import STOP

_LONGEST_HOLDER = 200
_RELEASE_SECONDS = 60.0
"""How long a job waits for GPUs that others hold before it gives its place back to the pool."""
_POLL_SECONDS = 1.0


@contextlib.contextmanager
def leased_devices(config: RunConfig, processes: Iterable[Process], holder: str) -> Iterator[Assignment]:
    """Assigns GPUs of this host to these processes and holds them during a `with` block; never waits for GPUs.

    `holder`: for the errors of others, such as the run's URL. Raises DevicesInUse and InputError as `assign` does.
    """
    processes = list(processes)
    # Others are not asked for their GPUs, because that imports torch.
    devices = host_devices() if may_use_devices(config, processes) else None
    if not devices:
        yield assign(config, processes, devices)
        return
    folder = memory_folder() / "gpus"
    folder.mkdir(exist_ok=True)
    uuids = _uuids()
    with contextlib.ExitStack() as leases:
        with (folder / "choosing").open("a") as choosing:
            # One process at a time, for milliseconds: it locks all free GPUs before it knows which it needs.
            fcntl.flock(choosing, fcntl.LOCK_EX)
            files: dict[str, TextIO] = {}
            used: dict[str, str] = {}
            for device in devices:
                name = uuids.get(device, device).replace("/", "_")
                file: TextIO = leases.enter_context((folder / name).open("a+"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    files[device] = file
                except BlockingIOError:
                    file.seek(0)
                    used[device] = file.read(_LONGEST_HOLDER)
            assignment = assign(config, processes, devices, used)
            needed = {device for names in assignment.values() for device in names}
            for device, file in files.items():
                if device in needed:
                    file.truncate(0)
                    file.write(holder)
                    file.flush()
                else:
                    file.close()
        yield assignment


@contextlib.contextmanager
def devices_when_free(config: RunConfig, processes: Iterable[Process], holder: str) -> Iterator[Assignment]:
    """`leased_devices`, after waiting a while for others, such as a job that drains, to release some.

    Raises PlaceYielded if they do not: another host of the pool may have free ones.
    """
    processes, began = list(processes), time.monotonic()
    with contextlib.ExitStack() as stack:
        while True:
            try:
                assignment = stack.enter_context(leased_devices(config, processes, holder))
                break
            except DevicesInUse as error:
                if STOP.is_set() or time.monotonic() - began > _RELEASE_SECONDS:
                    raise PlaceYielded(str(error)) from error
                STOP.wait(_POLL_SECONDS)
        yield assignment


def _uuids() -> dict[str, str]:
    """The UUID of each GPU of this host, or container, by its index; empty without the command nvidia-smi."""
    return dict(line.split(", ", 1) for line in query_gpus("index", "uuid") if ", " in line)
