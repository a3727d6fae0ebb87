"""The scorer's side of the rewards' fork server: has it load the rewards and fork workers.

RewardForkServer ──► python -m millrace.rewards.isolation.worker ──fork──► worker
RewardWorker     ◄──────────────── its birth socket ─────────────────────────┘
"""

import os
import resource
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from millrace.errors import InputError
from millrace.forking.client import Birth, ForkServer, ForkServerLost
from millrace.rewards.isolation.sandbox import Limits, scrubbed
from millrace.rewards.isolation.worker import CHUNK, READY

_LOAD_SECONDS = 300.0
"""For importing a reward's libraries; some take a minute on a cold disk."""
_READY_SECONDS = 10.0
_LONGEST_PROC_FILE = 4096
_CPUCLOCK_SCHED = 2
"""From Linux's posix-timers.h: the clock of a process that counts the time it ran."""


class RewardForkServer:
    """The process that loads the rewards of `recipes` (name: options) once and forks the workers. Close it when done.

    Raises InputError with one sentence if a reward can't be loaded. Once it is there, ForkServerLost means that its
    process has ended: the scorer must start anew.
    """

    def __init__(self, recipes: Mapping[str, Mapping[str, Any]], limits: Limits) -> None:
        self._spares: deque[Birth] = deque()
        """Workers being forked, or already there and blocked: the oldest first."""
        self.versions: dict[str, str] = {}
        """By the name of each reward."""
        self.late = False
        """Whether each worker loads the rewards itself, and so takes the memory and time for that."""
        self._ready_seconds = _READY_SECONDS
        server = self._start(recipes, limits, late=False) or self._start(recipes, limits, late=True)
        assert server is not None, "late, nothing is loaded that could keep it from forking"
        self._forks = server

    def prefork(self, spares: int) -> None:
        """Have workers forked ahead of time until so many are spare. Does not wait for them."""
        while len(self._spares) < spares:
            self._spares.append(self._forks.order({}))

    def take(self) -> "RewardWorker":
        """A worker that has scored nothing yet: the spare one that has been there longest."""
        self.prefork(1)
        birth = self._spares.popleft()
        worker = RewardWorker(birth.wait(), birth.socket)
        worker.await_ready(self._ready_seconds)
        return worker

    def kill(self, worker: "RewardWorker") -> None:
        """End a worker, whatever it is doing."""
        self._kill(worker)
        self._forks.forget(worker.pid)

    def reap(self, worker: "RewardWorker") -> int:
        """How a worker ended by itself: its exit code, or minus the signal that ended it."""
        self._kill(worker)
        return self._forks.exit_code(worker.pid)

    def close(self) -> None:
        """End the fork server. The kernel then kills its workers."""
        for birth in self._spares:
            birth.close()
        self._forks.close()

    def _start(self, recipes: Mapping[str, Mapping[str, Any]], limits: Limits, *, late: bool) -> ForkServer | None:
        """A fork server that has loaded the rewards; None if they can only be loaded late."""
        server = ForkServer(
            [sys.executable, "-m", "millrace.rewards.isolation.worker"],
            {"rewards": recipes, "limits": asdict(limits), "late": late},
            adopts=False,
            environment=scrubbed(dict(os.environ)),
        )
        try:
            reply = _loaded(server, ", ".join(recipes))
        except BaseException:
            server.close()
            raise
        if "late" in reply:
            server.close()
            return None
        self.versions = reply["versions"]
        # A worker that loads the rewards itself gets the time for it: it is not part of any response's deadline.
        self.late = late
        self._ready_seconds = _LOAD_SECONDS if late else _READY_SECONDS
        return server

    @staticmethod
    def _kill(worker: "RewardWorker") -> None:
        worker.socket.close()
        # Its process id is still its own: the fork server reaps it only when told to, or when it has ended itself.
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)


def _loaded(server: ForkServer, names: str) -> dict[str, Any]:
    """The fork server's reply to its recipe. Raises InputError if it could not load the rewards."""
    expected = "expected a reward that can be imported"
    try:
        reply = server.loaded(_LOAD_SECONDS)
    except TimeoutError as error:
        raise InputError(f"scoring: {names} is not loaded after {_LOAD_SECONDS:.0f} s; {expected}") from error
    except ForkServerLost as error:
        raise InputError(f"scoring: the process that was to load {names} ended with {error}; {expected}") from error
    if "error" in reply:
        raise InputError(reply["error"])
    return reply


class RewardWorker:
    """A forked worker, with the tasks it was sent and has not answered. It is scoring the first of them right now."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.socket = connection
        self.tasks: deque[int] = deque()
        """Numbers of the unanswered tasks, in the order sent."""
        self.since = 0.0
        """When it began the first of them, by the monotonic clock."""
        self.given = 0
        """Tasks sent to it in total."""
        self._outbox = bytearray()
        self._inbox = bytearray()
        # As clock_getcpuclockid(3) makes it. /proc/PID/schedstat was seen to jump by 4 ms.
        self._processor_clock = ~pid << 3 | _CPUCLOCK_SCHED
        self._used = 0.0
        """Processor seconds that it had used when `lap_seconds` was last called."""
        self._resident_at_start = 0
        self._threads_at_start = 0

    def await_ready(self, seconds: float) -> None:
        """Wait until it has warmed up, for so many seconds at most. A preforked worker usually has."""
        self.socket.settimeout(seconds)
        # A worker that never gets ready is killed when its first task is overdue.
        with suppress(TimeoutError, ConnectionResetError):
            self.socket.recv(len(READY))
        self.socket.setblocking(False)
        self._resident_at_start, self._threads_at_start = self._resident(), self._num_threads()

    @property
    def sending(self) -> bool:
        """Whether part of a task is still unsent."""
        return bool(self._outbox)

    def memory_mb(self) -> float:
        """Memory taken since it was ready, MiB."""
        return (self._resident() - self._resident_at_start) / 2**20

    def threads(self) -> int:
        """Threads started since it was ready."""
        return self._num_threads() - self._threads_at_start

    def busy_seconds(self) -> float:
        """Processor time that it has used since `lap_seconds` was last called."""
        # If the fork server has ended, so has it, and nobody keeps its process id.
        with suppress(OSError):
            return time.clock_gettime(self._processor_clock) - self._used
        return 0.0

    def lap_seconds(self) -> float:
        """The same; from then on it is counted anew."""
        busy = self.busy_seconds()
        self._used += busy
        return busy

    def give(self, number: int, line: bytes, now: float) -> None:
        """Send it a task."""
        if not self.tasks:
            self.since = now
            self.lap_seconds()
        self.tasks.append(number)
        self.given += 1
        self._outbox += line
        self.flush()

    def flush(self) -> None:
        """Send as much as its socket takes."""
        # If it has ended, `receive` notices.
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._outbox:
                del self._outbox[: self.socket.send(self._outbox)]

    def has_answered(self) -> bool:
        """Whether a line has arrived that was not received yet, or it has ended."""
        try:
            arrived = self.socket.recv(CHUNK, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True
        return not arrived or b"\n" in arrived

    def receive(self, longest: int) -> list[bytes] | None:
        """The lines that have arrived. None if it has ended, or sent a line longer than `longest` bytes."""
        try:
            chunk = self.socket.recv(CHUNK)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            return None
        self._inbox += chunk
        *lines, rest = self._inbox.split(b"\n") if b"\n" in chunk else [self._inbox]
        self._inbox = rest
        return None if not chunk or len(rest) > longest else [bytes(line) for line in lines]

    def _resident(self) -> int:
        return int(self._read("statm").split()[1]) * resource.getpagesize()

    def _num_threads(self) -> int:
        # Each thread is a folder in there. Counting them by its links is cheaper than reading `status`.
        return os.stat(f"/proc/{self.pid}/task").st_nlink - 2  # noqa: PTH116 — as below

    def _read(self, name: str) -> bytes:
        """One of the kernel's files about it. They exist until it is reaped."""
        # `open` and its buffers take three times as long, every millisecond or two.
        descriptor = os.open(f"/proc/{self.pid}/{name}", os.O_RDONLY)
        try:
            return os.read(descriptor, _LONGEST_PROC_FILE)
        finally:
            os.close(descriptor)
