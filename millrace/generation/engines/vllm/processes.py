"""vLLM's processes: the engine core, and the workers that it starts. None of them outlives the engine."""

import contextlib
from collections.abc import Iterable

# vLLM needs it too.
import psutil

_PATIENCE = 10.0
"""Seconds that a worker has to notice that its core is gone."""


def vllm_processes() -> set[psutil.Process]:
    """vLLM's processes below this one."""
    return {process for process in psutil.Process().children(recursive=True) if _is_alive(process)}


def end(processes: Iterable[psutil.Process]) -> None:
    """Waits until these have ended, and kills the ones that do not.

    A worker whose core was killed ends by itself as a rule, but not always: in the middle of a call it can wait for the
    core's next message for ever, and hold the device's memory.
    """
    # An orphan stays a zombie until its new parent waits for it: only those that are alive are worth the wait.
    _, left = psutil.wait_procs([process for process in processes if _is_alive(process)], timeout=_PATIENCE)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.name().startswith("VLLM::")
    except psutil.NoSuchProcess:
        return False
