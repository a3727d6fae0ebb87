"""A stage process's use of its machine: CPU, memory and GPUs."""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

CPU_CORES = "usage/cpu_cores"
MEMORY_BYTES = "usage/memory_bytes"
GPU_BUSY_SHARE = "usage/gpu_busy_share"
GPU_MEMORY_BYTES = "usage/gpu_memory_bytes"

_SAMPLE_SECONDS = 2.0


class ProcessTree:
    """CPU time and memory of this process and its descendants, such as an engine's workers."""

    def __init__(self) -> None:
        self._t, self._cpu_seconds = time.monotonic(), 0.0
        self.look()

    def look(self) -> tuple[float, int]:
        """CPU seconds per second since the last call, and resident bytes; shared memory counts for each process."""
        cpu_seconds, memory_bytes = 0.0, 0
        for pid in [os.getpid(), *_descendants(os.getpid())]:
            try:
                process = psutil.Process(pid)
                # With the time of children that have ended.
                cpu_seconds += sum(process.cpu_times()[:4])
                memory_bytes += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        now = time.monotonic()
        seconds, used = now - self._t, cpu_seconds - self._cpu_seconds
        self._t, self._cpu_seconds = now, cpu_seconds
        # A descendant that ended as an orphan takes its time along.
        return max(0.0, used) / max(seconds, 1e-9), memory_bytes


def _descendants(pid: int) -> Iterator[int]:
    # psutil's own would read the status of every process of the machine.
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, file.read_text().split()):
                yield child
                yield from _descendants(child)


class Gpus:
    """Use of a process's GPUs, by all processes on them, as NVIDIA's management library (NVML) measures it.

    `devices`: names as in CUDA_VISIBLE_DEVICES. `say` gets one line if they can't be measured: without the package
    nvidia-ml-py, which the extra `gpu` brings, or for MIG instances.
    """

    def __init__(self, devices: Sequence[str], say: Callable[[str], None]) -> None:
        self._devices, self._say = tuple(devices), say
        self._handles: list[Any] | None = None
        self._t = -math.inf
        self._samples: list[tuple[float, float]] = []
        """Share of the time with a kernel running, mean of the GPUs; and bytes in use on all of them."""

    def sample(self, *, now: bool = False) -> None:
        """Measures every two seconds, or `now`; cheap enough for any loop.

        NVML averages the share over the last second or less, so a stage that measures only between two pieces of work
        would find its GPUs idle.
        """
        t = time.monotonic()
        if not self._devices or (not now and t - self._t < _SAMPLE_SECONDS):
            return
        self._t = t
        try:
            # Imported late: few stages have a GPU.
            import pynvml
        except ImportError as error:
            self._give_up(error)
            return
        try:
            if self._handles is None:
                pynvml.nvmlInit()
                self._handles = [_handle(pynvml, name) for name in self._devices]
            shares = [pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in self._handles]
            used = [pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in self._handles]
        except pynvml.NVMLError as error:
            self._give_up(error)
            return
        self._samples.append((sum(shares) / len(shares), float(sum(used))))

    def look(self) -> dict[str, float]:
        """Share of the time with a kernel running, from 0 to 1, and bytes in use: mean and maximum since the last call.

        Empty without GPUs, or if they can't be measured.
        """
        self.sample(now=not self._samples)
        samples, self._samples = self._samples, []
        if not samples:
            return {}
        shares, used = zip(*samples, strict=True)
        return {GPU_BUSY_SHARE: sum(shares) / len(shares), GPU_MEMORY_BYTES: max(used)}

    def _give_up(self, error: Exception) -> None:
        self._devices = ()
        self._say(f"The use of GPUs is not measured: {error}")


def _handle(pynvml: Any, name: str) -> Any:
    # NVML counts GPUs by bus; CUDA does too, unless a host has GPUs of several kinds.
    return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
