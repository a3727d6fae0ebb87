"""What a GPU and its host can copy: the bounds of a handover from GPU to GPU through shared memory."""

import statistics
import time

import torch

_REPEATS = 5


def copy_rates(nbytes: int) -> dict[str, float]:
    """Bytes per second of one copy of `nbytes` (a read and a write count once), medians, one thread of the host.

    `pageable` is ordinary memory, as the handover's file is; `pinned` comes only from the driver.
    """
    on_device = [torch.ones(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    pageable = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(2)]
    pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
    pairs = {
        "device to device": (on_device[0], on_device[1]),
        "device to pinned host": (on_device[0], pinned),
        "pinned host to device": (pinned, on_device[1]),
        "device to pageable host": (on_device[0], pageable[1]),
        "pageable host to device": (pageable[0], on_device[1]),
        "host to host": (pageable[0], pageable[1]),
    }
    return {name: nbytes / _seconds(source, target) for name, (source, target) in pairs.items()}


def _seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    times = []
    # The first one warms up.
    for _ in range(1 + _REPEATS):
        torch.cuda.synchronize()
        started = time.monotonic()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.monotonic() - started)
    return statistics.median(times[1:])
