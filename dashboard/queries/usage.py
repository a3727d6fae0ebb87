"""CPU and memory use of each stage replica over minutes, logged about every two seconds."""

from dashboard.queries.series import ChartLine, metric, minutes, replicas, thin
from dashboard.read.model import RunData
from millrace.runs.status import STAGES
from millrace.runtime.metrics import CPU_CORES, MEMORY_BYTES

_GIB = 1 << 30


def cpu_cores(run: RunData) -> dict[str, ChartLine]:
    """`<stage>-<replica>` → CPU cores in use, including child processes."""
    return _by_replica(run, CPU_CORES)


def memory_gib(run: RunData) -> dict[str, ChartLine]:
    """`<stage>-<replica>` → resident memory in GiB, including child processes."""
    return {name: ChartLine(line.x, line.y / _GIB) for name, line in _by_replica(run, MEMORY_BYTES).items()}


def _by_replica(run: RunData, name: str) -> dict[str, ChartLine]:
    named = {replica: metric(run, replica, name) for stage in STAGES for replica in replicas(run, stage)}
    return {
        replica: thin(ChartLine(minutes(run, rows["t"]), rows["value"]))
        for replica, rows in named.items()
        if len(rows["t"])
    }
