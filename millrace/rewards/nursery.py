"""The scorer's side of the nursery: it is started here, forks when asked, and what it forked is ended here.

Nursery ──control──► python -m millrace.rewards.judging ──fork──► judge
Judge   ◄────────────────── a socket of its own ──────────────────┘
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
from millrace.rewards.judging import LONGEST_COMMAND, READY
from millrace.rewards.sandbox import Limits, scrubbed

_LOAD_SECONDS = 300.0
"""For the libraries of a reward to be imported; some take a minute on a cold disk."""
_READY_SECONDS = 10.0
_CHUNK = 2**18


class NurseryLost(RuntimeError):
    """The process that the judges are forked from has ended: a fault, after which the scorer starts anew."""


class Nursery:
    """Where the rewards of `recipes` (name: options) are loaded, once for all judges. Close it when done.

    Raises InputError with one sentence where a reward can't be loaded.
    """

    def __init__(self, recipes: Mapping[str, Mapping[str, Any]], limits: Limits) -> None:
        self._ordered: socket.socket | None = None
        self._born: Judge | None = None
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "millrace.rewards.judging"],
                stdin=theirs.fileno(),
                # What a module prints when it is imported must not pass for a line of the stage.
                stdout=subprocess.DEVNULL,
                env=scrubbed(dict(os.environ)),
            )
        try:
            self.versions: dict[str, str] = self._start(recipes, limits)
        except BaseException:
            self.close()
            raise

    def order(self) -> None:
        """Asks for one more judge, if none is asked for; there is no wait for it to be there."""
        if self._ordered is None:
            self._ordered, theirs = socket.socketpair()
            with theirs:
                self._tell({}, theirs.fileno())

    def take(self) -> "Judge":
        """A process that has judged nothing yet: the one that was ordered."""
        self.order()
        self._await_birth()
        assert self._born is not None, "it was ordered"
        judge, self._born, self._ordered = self._born, None, None
        judge.await_ready()
        return judge

    def kill(self, judge: "Judge") -> None:
        """Ends it, whatever it is at."""
        self._kill(judge)
        self._tell({"reap": judge.pid, "answer": False})

    def bury(self, judge: "Judge") -> int:
        """How one that has ended by itself did: its exit code, or minus the signal that ended it."""
        # Answers come in the order of what was asked.
        self._await_birth()
        self._kill(judge)
        self._tell({"reap": judge.pid, "answer": True})
        status: int = self._heard()["status"]
        return status

    def close(self) -> None:
        """Ends it, and with it every judge."""
        if self._ordered is not None:
            self._ordered.close()
        self._control.close()
        # Nothing is in it that could be lost; its judges are killed by the kernel when it ends.
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
        said = json.loads(message)
        if "mistake" in said:
            raise InputError(said["mistake"])
        versions: dict[str, str] = said["versions"]
        return versions

    def _await_birth(self) -> None:
        if self._ordered is not None and self._born is None:
            self._born = Judge(self._heard()["pid"], self._ordered)

    @staticmethod
    def _kill(judge: "Judge") -> None:
        judge.socket.close()
        # It is not reaped before the nursery is told to, so the number is still its own: unless the nursery is gone.
        with suppress(ProcessLookupError):
            os.kill(judge.pid, signal.SIGKILL)

    def _tell(self, command: Mapping[str, Any], *descriptors: int) -> None:
        # That it has ended is noticed where it is to answer.
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._control, [json.dumps(command).encode("ascii")], descriptors)

    def _heard(self) -> dict[str, Any]:
        message = b""
        with suppress(ConnectionResetError):
            message = self._control.recv(LONGEST_COMMAND)
        if not message:
            raise NurseryLost(f"the process that rewards are loaded in ended (exit code {self._process.wait()})")
        said: dict[str, Any] = json.loads(message)
        return said


class Judge:
    """A child that judges: what it was sent and has not answered yet, the first of it being judged right now."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.socket = connection
        self.tasks: deque[int] = deque()
        """Numbers of the tasks it has been sent, in their order."""
        self.since = 0.0
        """When it began with the first of them, by the monotonic clock."""
        self.given = 0
        """Tasks it has ever been sent."""
        self._outbox = bytearray()
        self._inbox = bytearray()
        self._watched: tuple[int, float] | None = None
        self._at_birth = 0

    def await_ready(self) -> None:
        """Until it has warmed up: an ordered one has done so while nobody waited for it."""
        self.socket.settimeout(_READY_SECONDS)
        # One that never gets there is killed for the first response that it does not judge.
        with suppress(TimeoutError, ConnectionResetError):
            self.socket.recv(len(READY))
        self.socket.setblocking(False)
        self._at_birth = self._resident()

    @property
    def sending(self) -> bool:
        """Whether some of what it was sent has not gone out yet."""
        return bool(self._outbox)

    def memory_mb(self) -> float:
        """What it has taken since it was ready, MiB."""
        return (self._resident() - self._at_birth) / 2**20

    def busy_seconds(self) -> float:
        """Processor time it has used for the first of its tasks, as far as looks at it have seen; 0 at the first."""
        used = self._used_seconds()
        if self._watched is None or self._watched[0] != self.tasks[0]:
            self._watched = self.tasks[0], used
        return used - self._watched[1]

    def give(self, number: int, line: bytes, now: float) -> None:
        """Sends it a task."""
        if not self.tasks:
            self.since = now
        self.tasks.append(number)
        self.given += 1
        self._outbox += line
        self.flush()

    def flush(self) -> None:
        """Sends what its socket takes."""
        # One that has ended is noticed where its verdicts are read.
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._outbox:
                del self._outbox[: self.socket.send(self._outbox)]

    def receive(self, longest: int) -> list[bytes] | None:
        """The lines that have come; None where it has ended, or sent a line longer than `longest` bytes."""
        try:
            chunk = self.socket.recv(_CHUNK)
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

    def _used_seconds(self) -> float:
        return int(self._read("schedstat").split()[0]) / 1e9

    def _read(self, name: str) -> str:
        """Of the kernel's files about it, which are there until it is reaped."""
        with open(f"/proc/{self.pid}/{name}", encoding="ascii") as file:  # noqa: PTH123 — read every few milliseconds
            return file.read()
