"""The process that benchmarks.dashboard measures: reads a run for the first time, and again on request.

    start ─► imports ─► first look ─► every view, as JSON ─► a line    everything is read
    a line in ─────────► look again ─► every view, as JSON ─► a line    only what is new is read

python -m benchmarks.dashboard.look RUN_URL
"""

import json
import sys
import time
from pathlib import Path

_STARTED = time.perf_counter()


def main() -> None:
    """Prints a line of JSON for the first look, and one for each line of standard input; seconds and bytes."""
    from dashboard.read.run_reader import RunReader
    from dashboard.views.blocks import Chart
    from dashboard.views.registry import VIEWS
    from storage.stores.factory import open_store

    imported = time.perf_counter()
    before = _resident_bytes("VmRSS")
    reader = RunReader(open_store(sys.argv[1]))
    while True:
        started = time.perf_counter()
        run = reader.look()
        looked = time.perf_counter()
        seconds: dict[str, float] = {"look": looked - started}
        for view in VIEWS:
            began = time.perf_counter()
            for block in view.blocks:
                built = block.build([run])
                if isinstance(block, Chart):
                    built.to_json()  # type: ignore[union-attr]
            seconds[view.name] = time.perf_counter() - began
        figures = {
            "trajectories": len(run.consumed["t"]),
            "problems": list(run.problems),
            "import_seconds": imported - _STARTED,
            "seconds": seconds,
            "rss_before": before,
            "peak_rss": _resident_bytes("VmHWM"),
        }
        print(json.dumps(figures), flush=True)
        if not sys.stdin.readline():
            return


def _resident_bytes(name: str) -> int:
    """Memory of this program alone: the peak from getrusage includes that of the parent process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
