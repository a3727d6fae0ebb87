"""Runs on a machine with GPUs what has never run on one, and writes one report to send.

    doctor ─► trainer ─► weights ─► ranks over NCCL ─► vLLM on CUDA ─► campaigns ─► benchmarks ─► gpu-check.txt

Each part is a separate process with a time limit, and a part that fails stops no other. Exit code 0 if all that
could run passed, 1 if something failed, 2 without a GPU.

    python -m benchmarks.gpu_check [--out gpu-check.txt] [--only NAME]
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.checking import Equipment, check
from benchmarks.gpu_check.parts import PARTS
from benchmarks.gpu_check.report import EARLIER, NEVER, passed_before, write
from millrace.doctor.diagnosis import as_json, diagnose
from millrace.doctor.machine import Machine


def main() -> int:
    """Checks, prints and writes; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check.txt"), help="the report (default: gpu-check.txt)")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="only these parts")
    arguments = parser.parse_args()
    machine = Machine("runs")
    num_gpus = 0 if machine.torch_devices is None else machine.torch_devices.num_gpus
    gpus = machine.gpus[:num_gpus]
    if not gpus:
        print("gpu-check: torch sees no GPU, so there is nothing to check; millrace doctor says why.", file=sys.stderr)
        return 2
    earlier = passed_before(EARLIER)
    parts = [part for part in PARTS if arguments.only is None or part.name in arguments.only]
    for part in parts:
        print(f"{part.name}: {earlier.get(part.name, NEVER)}")
    results = check(
        parts, Equipment(gpus=len(gpus), installed=machine.packages.get), lambda line: print(line, flush=True)
    )
    arguments.out.write_text(write(_about(machine, gpus), results, earlier))
    print(f"Written to {arguments.out}. Please send it: no part of it is secret but the names in its paths.")
    return 1 if any(result.outcome in ("failed", "too slow") for result in results) else 0


def _about(machine: Machine, gpus: Sequence[str]) -> dict[str, Any]:
    commit = subprocess.run(("git", "rev-parse", "HEAD"), capture_output=True, text=True, check=False)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or "unknown",
        "gpus": list(gpus),
        "doctor": as_json(diagnose(machine)),
    }


if __name__ == "__main__":
    sys.exit(main())
