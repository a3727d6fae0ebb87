"""The scorer's side of the fork server: starts it, has it fork workers, and ends what it forked.

ForkServer    ──control──► python -m millrace.rewards.isolation.worker ──fork──► worker
RewardWorker  ◄────────────────── a socket per worker ──────────────────────────┘
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from millrace.errors import InputError
from millrace.rewards.isolation.seccomp import Limits, scrubbed
from millrace.rewards.isolation.worker import CHUNK, LONGEST_COMMAND, READY

_LOAD_SECONDS = 300.0
"""For importing a reward's libraries; some take a minute on a cold disk."""
_READY_SECONDS = 10.0


class ForkServerLost(RuntimeError):
    """The fork server has ended. That is a fault: the scorer must start anew."""


class ForkServer:
    """The process that loads the rewards of `recipes` (name: options) once and forks the workers. Close it when done.

    Raises InputError with one sentence if a reward can't be loaded.
    """

    def __init__(self, recipes: Mapping[str, Mapping[str, Any]], limits: Limits) -> None:
        self._pending: socket.socket | None = None
        """Our end of the socket of the worker being forked, or of `_spare`."""
        self._spare: RewardWorker | None = None
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "millrace.rewards.isolation.worker"],
                stdin=theirs.fileno(),
                # Modules may print when imported; that must not be taken for the stage's own lines.
                stdout=subprocess.DEVNULL,
                env=scrubbed(dict(os.environ)),
            )
        try:
            self.versions: dict[str, str] = self._start(recipes, limits)
        except BaseException:
            self.close()
            raise

    def prefork(self) -> None:
        """Have one worker forked ahead of time, unless there is one. Does not wait for it."""
        if self._pending is None:
            self._pending, theirs = socket.socketpair()
            with theirs:
                self._send({}, theirs.fileno())

    def take(self) -> "RewardWorker":
        """A worker that has scored nothing yet: the preforked one."""
        self.prefork()
        self._receive_spare()
        assert self._spare is not None, "it was preforked"
        worker, self._spare, self._pending = self._spare, None, None
        worker.await_ready()
        return worker

    def kill(self, worker: "RewardWorker") -> None:
        """End a worker, whatever it is doing."""
        self._kill(worker)
        self._send({"reap": worker.pid, "answer": False})

    def reap(self, worker: "RewardWorker") -> int:
        """How a worker ended by itself: its exit code, or minus the signal that ended it."""
        # Replies come in the order of the commands.
        self._receive_spare()
        self._kill(worker)
        self._send({"reap": worker.pid, "answer": True})
        status: int = self._receive()["status"]
        return status

    def close(self) -> None:
        """End the fork server, and all workers with it."""
        if self._pending is not None:
            self._pending.close()
        self._control.close()
        # It holds nothing that could be lost. When it ends, the kernel kills its workers.
        self._process.kill()
        self._process.wait()

    def _start(self, recipes: Mapping[str, Mapping[str, Any]], limits: Limits) -> dict[str, str]:
        names = ", ".join(recipes)
        self._control.send(json.dumps({"rewards": recipes, "limits": asdict(limits)}).encode("ascii"))
        self._control.settimeout(_LOAD_SECONDS)
        try:
            message = self._control.recv(LONGEST_COMMAND)
        except TimeoutError as error:
            raise InputError(
                f"scoring: {names} is not loaded after {_LOAD_SECONDS:.0f} s; expected a reward that can be imported"
            ) from error
        self._control.settimeout(None)
        if not message:
            code = self._process.wait()
            raise InputError(
                f"scoring: the process that was to load {names} ended with exit code {code}; "
                "expected a reward that can be imported"
            )
        reply = json.loads(message)
        if "error" in reply:
            raise InputError(reply["error"])
        versions: dict[str, str] = reply["versions"]
        return versions

    def _receive_spare(self) -> None:
        if self._pending is not None and self._spare is None:
            self._spare = RewardWorker(self._receive()["pid"], self._pending)

    @staticmethod
    def _kill(worker: "RewardWorker") -> None:
        worker.socket.close()
        # Its process id is still its own: the fork server reaps it only when told to, or when it has ended itself.
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)

    def _send(self, command: Mapping[str, Any], *descriptors: int) -> None:
        # If the fork server has ended, the next `_receive` notices.
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._control, [json.dumps(command).encode("ascii")], descriptors)

    def _receive(self) -> dict[str, Any]:
        message = b""
        with suppress(ConnectionResetError):
            message = self._control.recv(LONGEST_COMMAND)
        if not message:
            raise ForkServerLost(f"the process that rewards are loaded in ended (exit code {self._process.wait()})")
        reply: dict[str, Any] = json.loads(message)
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
        self._cpu_start: tuple[int, float] | None = None
        """A task, and the processor seconds used when that task was first seen in front."""
        self._resident_at_start = 0

    def await_ready(self) -> None:
        """Wait until it has warmed up. A preforked worker usually has."""
        self.socket.settimeout(_READY_SECONDS)
        # A worker that never gets ready is killed when its first task is overdue.
        with suppress(TimeoutError, ConnectionResetError):
            self.socket.recv(len(READY))
        self.socket.setblocking(False)
        self._resident_at_start = self._resident()

    @property
    def sending(self) -> bool:
        """Whether part of a task is still unsent."""
        return bool(self._outbox)

    def memory_mb(self) -> float:
        """Memory taken since it was ready, MiB."""
        return (self._resident() - self._resident_at_start) / 2**20

    def busy_seconds(self) -> float:
        """Processor time used since this was first called for its current task; 0 at that first call."""
        used = int(self._read("schedstat").split()[0]) / 1e9
        if self._cpu_start is None or self._cpu_start[0] != self.tasks[0]:
            self._cpu_start = self.tasks[0], used
        return used - self._cpu_start[1]

    def give(self, number: int, line: bytes, now: float) -> None:
        """Send it a task."""
        if not self.tasks:
            self.since = now
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

    def _read(self, name: str) -> str:
        """One of the kernel's files about it. They exist until it is reaped."""
        with open(f"/proc/{self.pid}/{name}", encoding="ascii") as file:  # noqa: PTH123 — read every few milliseconds
            return file.read()
