"""The process that benchmarks.dashboard measures: looks at a run for the first time, and again when it is told to.

    start ─► imports ─► first look ─► every view, as JSON ─► a line    what there is by then was read by nobody before
    a line in ─────────► look again ─► every view, as JSON ─► a line    only what is new is read

python -m benchmarks.dashboard_look RUN_URL
"""

import json
import sys
import time
from pathlib import Path

_STARTED = time.perf_counter()


def main() -> None:
    """Prints a line of JSON for the first look, and one for each line of standard input; seconds and bytes."""
    from dashboard.blocks import Chart
    from dashboard.reading import RunReader
    from dashboard.views import VIEWS
    from storage.factory import open_store

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
        told = {
            "trajectories": len(run.consumed["t"]),
            "problems": list(run.problems),
            "import_seconds": imported - _STARTED,
            "seconds": seconds,
            "rss_before": before,
            "peak_rss": _resident_bytes("VmHWM"),
        }
        print(json.dumps(told), flush=True)
        if not sys.stdin.readline():
            return


def _resident_bytes(name: str) -> int:
    """Memory of this program alone: what getrusage calls the peak is also that of whoever started it."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
