"""The whole diagnosis: what this machine can do, line by line."""

from collections.abc import Sequence
from typing import Any

from millrace.doctor.gpus import find_gpus, gpu_lines
from millrace.doctor.host import host_lines
from millrace.doctor.line import Line
from millrace.doctor.machine import Machine
from millrace.doctor.network import network_lines
from millrace.doctor.packages import package_lines
from millrace.doctor.storage import storage_lines


def diagnose(machine: Machine, root: str) -> list[Line]:
    """All lines, group by group. `root`: folder or URL under which runs are stored."""
    gpus = find_gpus(machine)
    return [
        *host_lines(machine),
        *package_lines(machine, gpus=len(gpus)),
        *storage_lines(machine, root),
        *network_lines(machine),
        *gpu_lines(machine, gpus),
    ]


def is_ready(lines: Sequence[Line]) -> bool:
    """Whether a campaign can run on this machine's CPUs."""
    return not any(line.stops_campaigns for line in lines)


def as_json(lines: Sequence[Line]) -> dict[str, Any]:
    """Plain JSON."""
    return {"ready": is_ready(lines), "lines": [{name: getattr(line, name) for name in _FIELDS} for line in lines]}


_FIELDS = ("group", "what", "found", "state", "needed", "remedy")
