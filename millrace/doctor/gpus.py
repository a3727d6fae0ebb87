"""GPUs, their links, and whether torch can use them. A campaign on CPUs needs none of it."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from millrace.doctor.machine import Line, Machine, State, TorchDevices

_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_TERMINAL_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Gpu(NamedTuple):
    """A line of nvidia-smi."""

    name: str
    memory: str
    driver: str


def find_gpus(machine: Machine) -> list[Gpu]:
    """The driver's GPUs, in its order."""
    printed = machine.run(*_QUERY) or ""
    rows = [[cell.strip() for cell in row.split(",")] for row in printed.splitlines()]
    return [Gpu(*row) for row in rows if len(row) == len(Gpu._fields)]


def gpu_lines(machine: Machine, gpus: list[Gpu]) -> Iterator[Line]:
    """`gpus`: from `find_gpus`."""
    if not gpus:
        broken = machine.has_command("nvidia-smi")
        yield Line(
            group="GPUs",
            what="GPUs",
            found="nvidia-smi finds none" if broken else "none: campaigns run on the CPU",
            state="wrong" if broken else "absent",
            remedy="Is the driver loaded? nvidia-smi says more." if broken else "",
        )
        return
    kinds = Counter((gpu.name, gpu.memory) for gpu in gpus)
    found = ", ".join(f"{count} × {name}, {memory}" for (name, memory), count in kinds.items())
    yield Line(group="GPUs", what="GPUs", found=f"{found}; driver {gpus[0].driver}", state="ok")
    version = machine.installed("torch") or ""
    if not version or version.endswith("+cpu"):
        yield Line(
            group="GPUs",
            what="torch",
            found=f"{version or 'not installed'}: built without CUDA",
            state="wrong",
            remedy="In a new environment: pip install --constraint constraints.txt --editable '.[gpu]'.",
        )
    else:
        yield from _torch(machine.torch_devices(), len(gpus))
    yield _links(machine.run("nvidia-smi", "topo", "-m") or "", len(gpus))
    yield _fabric(machine)
    yield Line(
        group="GPUs",
        what="this code on GPUs",
        found="no campaign has run on one yet",
        state="absent",
        remedy="Run make gpu-check and send its report.",
    )


def _torch(devices: TorchDevices, count: int) -> Iterator[Line]:
    fine = len(devices.names) == count
    yield Line(
        group="GPUs",
        what="torch",
        found=f"uses {len(devices.names)} of {count}; NCCL {devices.nccl or 'missing'}",
        state="ok" if fine else "wrong",
        remedy="" if fine else "Is CUDA_VISIBLE_DEVICES set? Is the driver older than torch.version.cuda?",
    )
    if count > 1:
        all_pairs = len(devices.peers) == count * (count - 1)
        yield Line(
            group="GPUs",
            what="peer access",
            found="each GPU reads each other's memory" if all_pairs else f"{len(devices.peers)} ordered pairs",
            state="ok" if all_pairs else "wrong",
            remedy="" if all_pairs else "NCCL goes through the host: check IOMMU and NCCL_P2P_DISABLE.",
        )


def _links(topology: str, count: int) -> Line:
    kinds = link_kinds(topology)
    nvlink = {kind for kind in kinds if kind.startswith("NV")}
    state: State = "ok"
    remedy = ""
    if count == 1:
        found = "one GPU: none needed"
    elif not kinds:
        found, state = "nvidia-smi topo says nothing", "absent"
    else:
        pairs = (f"{kind} between {number} pair{'s' if number > 1 else ''}" for kind, number in sorted(kinds.items()))
        found = ", ".join(pairs)
        if nvlink != set(kinds):
            state, remedy = "absent", "Without NVLink weights and tensor-parallel layers go over PCIe."
    return Line(group="GPUs", what="links", found=found, state=state, remedy=remedy)


def link_kinds(topology: str) -> Counter[str]:
    """How many pairs of GPUs have which kind of link (NV18, PIX, SYS, …), from the output of `nvidia-smi topo -m`."""
    rows = [re.split(r"\s+", _TERMINAL_COLOURS.sub("", line).strip()) for line in topology.splitlines()]
    between = [row for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and row[1] != "GPU1"]
    return Counter(row[1 + other] for at, row in enumerate(between) for other in range(at + 1, len(between)))


def _fabric(machine: Machine) -> Line:
    names = machine.names_in(Path("/sys/class/infiniband"))
    return Line(
        group="GPUs",
        what="links to other hosts",
        found=", ".join(names) or "Ethernet only",
        state="ok" if names else "absent",
    )
