"""The scorer's side of the rewards' fork server: has it load the rewards and fork workers.

RewardForkServer ──► python -m millrace.rewards.isolation.worker ──fork──► worker
RewardWorker     ◄──────────────── its birth socket ─────────────────────────┘
"""

import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import psutil

from millrace.errors import InputError
from millrace.forking.client import ForkServer, ForkServerLost
from millrace.rewards.isolation.sandbox import Limits, scrubbed
from millrace.rewards.isolation.worker import CHUNK, READY

_LOAD_SECONDS = 300.0
"""For importing a reward's libraries; some take a minute on a cold disk."""
_LONGEST_LINE = 2**20
"""Bytes of a score. A worker that writes more has been taken over by a response."""
_CPUCLOCK_SCHED = 2
"""From Linux's posix-timers.h: the clock of a process that counts the time it ran."""
_IDLE_FACTOR = 50.0
"""A task that sleeps costs its wall time divided by this. On a busy machine every worker waits for a processor."""


class RewardForkServer:
    """The process that loads rewards once and forks the workers. Close it when done.

    `options`: `Reward.options` by name. Raises InputError if a reward can't be loaded. Later ForkServerLost means that
    the process has ended, and the scorer must start anew.
    """

    def __init__(self, options: Mapping[str, Mapping[str, Any]], limits: Limits) -> None:
        self._server, loaded = _start(options, limits, late=False)
        self.versions: dict[str, str] = loaded["versions"]
        """Version of each reward by its name."""
        if not loaded["can_fork"]:
            # Each worker loads the rewards itself.
            self._server.close()
            self._server, _ = _start(options, limits, late=True)
        self._spare = self._server.order({})

    def take(self) -> "RewardWorker":
        """Return a worker that has scored nothing yet, and have the next one forked."""
        birth, self._spare = self._spare, self._server.order({})
        return RewardWorker(birth.wait(), birth.socket)

    def reap(self, worker: "RewardWorker") -> int:
        """End a worker, whatever it is doing; return its exit code, or minus the signal that ended it."""
        worker.kill()
        return self._server.exit_code(worker.pid)

    def close(self) -> None:
        """End the fork server. The kernel then kills its workers."""
        self._spare.socket.close()
        self._server.close()


def _start(
    options: Mapping[str, Mapping[str, Any]], limits: Limits, *, late: bool
) -> tuple[ForkServer, dict[str, Any]]:
    """Start a fork server and return its reply. Raises InputError if it can't load the rewards."""
    server = ForkServer(
        [sys.executable, "-m", "millrace.rewards.isolation.worker"],
        {"rewards": options, "limits": asdict(limits), "late": late},
        environment=scrubbed(dict(os.environ)),
    )
    names = ", ".join(options)
    try:
        loaded = server.loaded(_LOAD_SECONDS)
        if "refusal" in loaded:
            raise InputError(**loaded["refusal"])
    except BaseException as error:
        server.close()
        if isinstance(error, TimeoutError):
            read = f"{names} is not loaded after {_LOAD_SECONDS:.0f} s"
        elif isinstance(error, ForkServerLost):
            read = f"the process that was to load {names} ended with {error}"
        else:
            raise
        raise InputError(read, file="scoring", expected="a reward that can be imported") from error
    return server, loaded


class RewardWorker:
    """A forked worker with the tasks that it was sent and has not answered; it is scoring the first of them."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        """Wait until the worker is ready."""
        self.pid = pid
        self.socket = connection
        self.tasks: deque[int] = deque()
        """Numbers of the unanswered tasks, in the order sent."""
        self.num_tasks = 0
        """Tasks sent in total."""
        self._outbox, self._inbox = bytearray(), b""
        # As clock_getcpuclockid(3) makes it. /proc/PID/schedstat was seen to jump by 4 ms.
        self._processor_clock = ~pid << 3 | _CPUCLOCK_SCHED
        self.socket.settimeout(_LOAD_SECONDS)
        # A worker that never gets ready is killed when its first task is overdue.
        with suppress(TimeoutError, ConnectionResetError):
            self.socket.recv(len(READY))
        self.socket.setblocking(False)
        self._process = psutil.Process(pid)
        self._memory_at_start = self._process.memory_info().rss
        self._threads_at_start = self._process.num_threads()
        self.begin()

    def begin(self) -> None:
        """Count seconds and cost of the current task from now on."""
        self._started, self._processor_started = time.monotonic(), self._processor_seconds()

    def seconds(self) -> float:
        """Wall time spent on the current task."""
        return time.monotonic() - self._started

    def cost(self) -> float:
        """Processor seconds spent on the current task, or a fraction of its wall time if that is more."""
        return max(self._processor_seconds() - self._processor_started, self.seconds() / _IDLE_FACTOR)

    def memory_mb(self) -> float:
        """Memory taken since it was ready, MiB."""
        return float(self._process.memory_info().rss - self._memory_at_start) / 2**20

    def num_threads(self) -> int:
        """Threads started since it was ready."""
        return self._process.num_threads() - self._threads_at_start

    def send(self, number: int, line: bytes) -> None:
        """Send it a task, or as much of it as its socket takes: `flush` sends the rest."""
        if not self.tasks:
            self.begin()
        self.tasks.append(number)
        self.num_tasks += 1
        self._outbox += line
        self.flush()

    def flush(self) -> None:
        """Send the rest of the tasks."""
        # If it has ended, `receive` notices.
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._outbox:
                del self._outbox[: self.socket.send(self._outbox)]

    def receive(self) -> list[bytes] | None:
        """Return the lines that have arrived, or None if it has ended or sent a line that is too long."""
        try:
            chunk = self.socket.recv(CHUNK)
        except ConnectionResetError:
            return None
        *lines, self._inbox = (self._inbox + chunk).split(b"\n")
        return lines if chunk and len(self._inbox) <= _LONGEST_LINE else None

    def kill(self) -> None:
        """Send it SIGKILL. Its process id stays its own until `exit_code` has it reaped."""
        self.socket.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _processor_seconds(self) -> float:
        # If the fork server has ended, so has the worker, and its process id is free.
        with suppress(OSError):
            return time.clock_gettime(self._processor_clock)
        return 0.0
