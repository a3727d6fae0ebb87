"""A pool of worker processes for isolated rewards.

    tasks ─► waiting ─► worker 1 ─┬─ a score                                   ─► the next task
                        worker 2  ├─ over its time, memory or threads: killed  ─► `timeout`, `error`
                           …      └─ ended without a score                     ─► `error`

    Pool ──► python -m millrace.rewards.isolation.worker ──fork──► worker
         ◄──────────────────── its birth socket ─────────────────────┘

A worker is sent a few tasks ahead, so that neither side waits for the other. When a worker ends, only the task that it
was scoring is affected: the others go to the next worker.
"""

import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Self

import psutil

from millrace.errors import InputError
from millrace.forking.client import ForkServer, ForkServerLost
from millrace.rewards.base import Reward, Score, failed
from millrace.rewards.isolation.sandbox import Limits, hide, scrubbed
from millrace.rewards.isolation.worker import CHUNK, READY, Task, read_score, task_line

_LOAD_SECONDS = 300.0
"""For importing a reward's libraries; some take a minute on a cold disk."""
_LONGEST_TASK = 16 * 2**20
"""Bytes of a response with its prompt. No verifier gets through more in time."""
_LONGEST_LINE = 2**20
"""Bytes of a score. A worker that writes more has been taken over by a response."""
_CHECK_SECONDS = 0.001
"""Time between two checks of the workers' limits."""
_AHEAD = 16
"""Maximum number of unanswered tasks per worker."""
_TASKS_PER_WORKER = 1000
"""A worker is replaced after this many tasks, so that caches in libraries can't grow for weeks."""
_MOST_THREADS = 64
"""Threads that a response may start. More would take the host's processors from everyone else."""


class Pool:
    """Scores with isolated rewards; every worker has all of them. A context manager; `versions` is set on entering.

    Entering raises InputError if a reward can't be loaded, and hides this process from its workers for good
    (`sandbox.hide`).
    """

    def __init__(self, rewards: Sequence[Reward], limits: Limits) -> None:
        self._rewards = rewards
        self._limits = limits
        self._tasks_per_worker = 1 if any(reward.fresh for reward in rewards) else _TASKS_PER_WORKER
        self._workers: list[_RewardWorker] = []
        self.versions: Sequence[str] = ()
        """Version of each reward."""

    def __enter__(self) -> Self:
        hide()
        self._server, loaded = self._start(late=False)
        self.versions = loaded["versions"]
        if not loaded["can_fork"]:
            self._server.close()
            self._server, _ = self._start(late=True)
        # Forked before they are needed: with a new process per response, several at once.
        num_spares = 2 * self._limits.workers if self._tasks_per_worker == 1 and loaded["can_fork"] else 1
        self._spares = deque(self._server.order({}) for _ in range(num_spares))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.socket.close()
        self._workers.clear()
        for spare in self._spares:
            spare.socket.close()
        # The kernel then kills its workers.
        self._server.close()

    def score(self, tasks: Sequence[Task], each: Callable[[], None] = lambda: None) -> Iterator[tuple[int, Score]]:
        """Yield (index of the task, its score) as soon as a task is done.

        `each` is called many times per second meanwhile. If the iterator is closed early, unfinished tasks are lost.
        Raises ForkServerLost if the fork server has ended.
        """
        waiting: deque[int] = deque()
        lines: dict[int, bytes] = {}
        for number, task in enumerate(tasks):
            line = task_line(task)
            if len(line) > _LONGEST_TASK:
                yield number, failed(f"{len(task.response):,} characters to score; at most {_LONGEST_TASK:,} bytes are")
            else:
                lines[number] = line
                waiting.append(number)
        checked = time.monotonic()
        try:
            while waiting or any(worker.tasks for worker in self._workers):
                self._assign(waiting, lines)
                sockets = wait([worker.socket for worker in self._workers], _CHECK_SECONDS)
                for worker in [worker for worker in self._workers if worker.socket in sockets]:
                    yield from self._receive(worker, waiting)
                if not sockets or time.monotonic() - checked >= _CHECK_SECONDS:
                    for worker in [worker for worker in self._workers if worker.tasks]:
                        if (score := worker.excess(self._limits)) is not None:
                            yield self._abandon(worker, waiting, score)
                    checked = time.monotonic()
                    each()
        finally:
            for worker in [worker for worker in self._workers if worker.tasks]:
                self._kill(worker)

    def _start(self, *, late: bool) -> tuple[ForkServer, dict[str, Any]]:
        """Start a fork server and return its reply. Raises InputError if it can't load the rewards."""
        server = ForkServer(
            [sys.executable, "-m", "millrace.rewards.isolation.worker"],
            {
                "rewards": [[reward.source, reward.name, dict(reward.options)] for reward in self._rewards],
                "limits": asdict(self._limits),
                "late": late,
            },
            environment=scrubbed(dict(os.environ)),
        )
        try:
            loaded = server.loaded(_LOAD_SECONDS)
            if "refusal" in loaded:
                raise InputError(**loaded["refusal"])
        except (TimeoutError, ForkServerLost) as error:
            server.close()
            names = ", ".join(reward.name for reward in self._rewards)
            read = f"{names} can't be loaded ({type(error).__name__}: {error})"
            raise InputError(read, file="scoring", expected="a reward that can be imported") from error
        return server, loaded

    def _assign(self, waiting: deque[int], lines: Mapping[int, bytes]) -> None:
        """Send tasks ahead, fewer towards the end, so that every worker keeps having some."""
        ahead = min(_AHEAD, 1 + len(waiting) // (2 * self._limits.workers))
        while waiting:
            ready = [
                worker
                for worker in self._workers
                if len(worker.tasks) < ahead and worker.num_tasks < self._tasks_per_worker
            ]
            if len(self._workers) < self._limits.workers:
                birth = self._spares.popleft()
                self._spares.append(self._server.order({}))
                worker = _RewardWorker(birth.wait(), birth.socket)
                self._workers.append(worker)
            elif ready:
                worker = min(ready, key=lambda worker: len(worker.tasks))
            else:
                break
            number = waiting.popleft()
            worker.send(number, lines[number])
        for worker in self._workers:
            worker.flush()

    def _receive(self, worker: "_RewardWorker", waiting: deque[int]) -> Iterator[tuple[int, Score]]:
        lines, num_expected = worker.receive(), len(worker.tasks)
        for line in (lines or [])[:num_expected]:
            yield worker.tasks.popleft(), read_score(line)
        if lines is not None and len(lines) <= num_expected:
            if worker.num_tasks >= self._tasks_per_worker and not worker.tasks:
                self._kill(worker)
        # It has ended, or was taken over by a response and sends more than it was asked for.
        elif worker.tasks:
            yield self._abandon(worker, waiting, None)
        else:
            self._kill(worker)

    def _abandon(self, worker: "_RewardWorker", waiting: deque[int], score: Score | None) -> tuple[int, Score]:
        """Kill a worker: its current task gets `score`, by default how the worker ended; the others wait again."""
        number = worker.tasks.popleft()
        waiting.extendleft(reversed(worker.tasks))
        self._workers.remove(worker)
        worker.kill()
        code = self._server.exit_code(worker.pid)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        score = score or failed(f"the process that scored it ended ({how})")
        return number, replace(score, seconds=worker.seconds())

    def _kill(self, worker: "_RewardWorker") -> None:
        """Kill a worker unless it has ended."""
        self._workers.remove(worker)
        worker.kill()
        self._server.forget(worker.pid)


class _RewardWorker:
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
        self.socket.settimeout(_LOAD_SECONDS)
        # A worker that never gets ready is killed when its first task is overdue.
        with suppress(TimeoutError, ConnectionResetError):
            self.socket.recv(len(READY))
        self.socket.setblocking(False)
        self._process = psutil.Process(pid)
        self._memory_at_start = self._process.memory_info().rss
        self._threads_at_start = self._process.num_threads()
        self._started = time.monotonic()

    def seconds(self) -> float:
        """Wall time spent on the current task."""
        return time.monotonic() - self._started

    def excess(self, limits: Limits) -> Score | None:
        """The score of the current task if it has used more than a response may."""
        if self.seconds() > limits.timeout_seconds:
            return failed(f"no verdict after {limits.timeout_seconds:g} s", "timeout")
        if self._process.memory_info().rss - self._memory_at_start > limits.memory_mb * 2**20:
            return failed(f"scoring it took more than {limits.memory_mb} MiB of memory")
        if self._process.num_threads() - self._threads_at_start > _MOST_THREADS:
            return failed(f"scoring it took more than {_MOST_THREADS} threads")
        return None

    def send(self, number: int, line: bytes) -> None:
        """Send it a task, or as much of it as its socket takes: `flush` sends the rest."""
        if not self.tasks:
            self._started = time.monotonic()
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
        if lines:
            self._started = time.monotonic()
        return lines if chunk and len(self._inbox) <= _LONGEST_LINE else None

    def kill(self) -> None:
        """Send it SIGKILL. Its process id stays its own until the fork server has reaped it."""
        self.socket.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
