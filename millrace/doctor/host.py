"""Python, cores, memory, shared memory and limits."""

from collections.abc import Iterator
from pathlib import Path

from millrace.doctor.line import Line
from millrace.doctor.machine import Machine

GIB = 2**30
_OLDEST_PYTHON = (3, 11)
_LEAST_MEMORY = 2 * GIB
"""The demo's processes take 1.2 GiB together, Prefect's server included."""
_LEAST_SHARED = 256 << 20
_LEAST_FILES = 1024
_SHARED_MEMORY = Path("/dev/shm")
_COPIES = 3
"""Versions that shared memory usually holds at a time (`millrace/weights/slots.py`)."""


def host_lines(machine: Machine) -> Iterator[Line]:
    """All of it is needed."""
    python = machine.python()
    fine = python[:2] >= _OLDEST_PYTHON
    yield Line(
        group="host",
        what="Python",
        found=".".join(map(str, python)),
        state="ok" if fine else "wrong",
        needed=True,
        remedy="" if fine else "Use Python 3.11 or newer: make PYTHON=python3.12 …",
    )
    cores = machine.cores()
    yield Line(group="host", what="cores", found=str(cores), state="ok", needed=True)
    bfloat16 = machine.multiplies_bfloat16()
    yield Line(
        group="host",
        what="bfloat16",
        found=f"multiplied by the {'GPU' if bfloat16 == 'GPU' else f'CPU ({bfloat16})'}" if bfloat16 else "emulated",
        state="ok" if bfloat16 else "absent",
        remedy="" if bfloat16 else "Compute in float32, as `auto` does: the dtype of generation and training.",
    )
    yield _memory(machine)
    yield _shared_memory(machine)
    files = machine.open_files()
    fine = files < 0 or files >= _LEAST_FILES
    yield Line(
        group="host",
        what="open files",
        found="no limit" if files < 0 else f"at most {files:,} per process",
        state="ok" if fine else "wrong",
        needed=True,
        remedy="" if fine else f"Raise the hard limit to {_LEAST_FILES:,} or more: ulimit -Hn.",
    )
    isolated = machine.has_library("libseccomp.so.2")
    yield Line(
        group="host",
        what="isolation of rewards",
        found="libseccomp" if isolated else "libseccomp.so.2 can't be loaded",
        state="ok" if isolated else "wrong",
        needed=True,
        remedy="" if isolated else "Install the package libseccomp2.",
    )


def _memory(machine: Machine) -> Line:
    free = machine.available_memory()
    fine = free is None or free >= _LEAST_MEMORY
    return Line(
        group="host",
        what="memory",
        found="unknown" if free is None else f"{free / GIB:.1f} GiB available",
        state="ok" if fine else "wrong",
        needed=True,
        remedy="" if fine else f"The demo wants {_LEAST_MEMORY // GIB} GiB, larger models more: end other programs.",
    )


def _shared_memory(machine: Machine) -> Line:
    if not machine.is_writable(_SHARED_MEMORY):
        return Line(
            group="host",
            what="shared memory",
            found=f"{_SHARED_MEMORY} can't be written",
            state="wrong",
            needed=True,
            remedy=f"Mount a tmpfs at {_SHARED_MEMORY} that this user may write to.",
        )
    room = machine.room(_SHARED_MEMORY)
    free = 0 if room is None else room.free
    fine = free >= _LEAST_SHARED
    return Line(
        group="host",
        what="shared memory",
        found=f"{free / GIB:.1f} GiB free: policies of up to {free / _COPIES / 2 / 1e9:.1f} billion 16-bit weights",
        state="ok" if fine else "wrong",
        needed=True,
        remedy="" if fine else "Give the container more: docker run --shm-size=8g, or shm_size on Kubernetes.",
    )
