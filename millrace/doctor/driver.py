"""The NVIDIA driver, and the oldest one that works with a build of torch.

`make gpu` asks before it installs anything, so this module imports only Python's library and the errors:

    python -m millrace.doctor.driver [VERSION]

VERSION stands for the driver of the machines that an image is built for. Exit code 2: it is missing or too old.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from millrace.errors import InputError

_OLDEST_SERIES = {"12": 525, "13": 580}
"""On Linux, by CUDA's major version: https://docs.nvidia.com/deploy/cuda-compatibility."""
_CONSTRAINTS = Path(__file__).parents[2] / "constraints-gpu.txt"
_COMMAND_SECONDS = 60.0
"""Without persistence mode, nvidia-smi first starts each GPU of the host."""


def query_gpus(*fields: str) -> list[str]:
    """Returns these fields of each GPU, a line per GPU, by nvidia-smi; nothing without that command, or if it fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True)
        return ran.stdout.splitlines()
    return []


def check_driver(driver: str | None, cuda: str) -> None:
    """Raises InputError unless torch built for this version of CUDA works with the driver; None: there is none."""
    # Any other version of CUDA is a newer one.
    oldest = _OLDEST_SERIES.get(cuda.partition(".")[0], max(_OLDEST_SERIES.values()))
    series = re.match(r"\d+", driver or "")
    if series is None or int(series[0]) < oldest:
        read = driver or "none: nvidia-smi is missing or finds no GPU"
        expected = f"series {oldest} or newer, for torch with CUDA {cuda}"
        raise InputError(read, key="the NVIDIA driver", expected=expected)


def main(arguments: Sequence[str]) -> int:
    """Checks the driver for the torch that constraints-gpu.txt pins; returns the exit code."""
    pinned = re.search(r"^cuda-toolkit==(\d+\.\d+)", _CONSTRAINTS.read_text(), re.MULTILINE)
    assert pinned is not None, f"{_CONSTRAINTS} pins CUDA torch"
    driver = next(iter(arguments or query_gpus("driver_version")), None)
    try:
        check_driver(driver, pinned[1])
    except InputError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
