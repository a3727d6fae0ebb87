"""The outside of a fork server: starts it, orders children, and is their parent.

ForkServer ──control socket──► fork server ──► children of this process
"""

import ctypes
import json
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from millrace.forking.server import LONGEST_MESSAGE
from storage.failpoints import failpoint

_ONE_THREAD = {
    # Each keeps a library from starting threads when it is imported: OpenMP and OpenBLAS, and Arrow's jemalloc.
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
_PR_SET_CHILD_SUBREAPER = 36
"""From Linux's prctl(2); Python has no name for it."""
_BORN_SECONDS = 30.0
"""A fork takes milliseconds; this is for a machine that swaps."""
_END_SECONDS = 2.0
"""For a fork server whose sockets are closed to end."""


class ForkServerLost(RuntimeError):
    """The fork server has ended, or does not answer. Its children live on."""


class ForkServer:
    """A fork server process, started with the command `program`. Close it when done.

    `recipe` (plain JSON) says what to load; `loaded` waits for the reply. `log` gets the fork server's standard error.
    It ends when this process ends, however that happens.
    """

    def __init__(
        self,
        program: Sequence[str],
        recipe: Mapping[str, Any],
        *,
        environment: Mapping[str, str],
        log: IO[bytes] | None = None,
    ) -> None:
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            self._process = subprocess.Popen(
                program,
                stdin=server_end.fileno(),
                # Modules may print when they are imported.
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**environment, **_ONE_THREAD},
                # Ctrl-C at a terminal is for this process alone.
                start_new_session=True,
            )
        self._send(recipe)

    def loaded(self, seconds: float) -> dict[str, Any]:
        """The reply to the recipe. Raises TimeoutError after that time, and ForkServerLost if it ended."""
        self._control.settimeout(seconds)
        try:
            return self._receive()
        finally:
            self._control.settimeout(None)

    def order(self, values: Mapping[str, Any], *descriptors: int) -> "Birth":
        """Orders a child without waiting for it. The child gets copies of the descriptors.

        If the fork server has ended, waiting for the birth says so.
        """
        birth, child_end = socket.socketpair()
        with child_end:
            self._send(values, child_end.fileno(), *descriptors)
        return Birth(self, birth)

    def adopt(self, values: Mapping[str, Any], *descriptors: int) -> int:
        """Has a child forked that becomes this process's own, and returns its process id; for one thread at a time.

        The fork server calls `serve` with `adopted`. Raises ForkServerLost, with how it ended.
        """
        # Only for now: other orphans, such as the ranks of a killed trainer, are for the system's first process.
        _set_subreaper(True)
        try:
            birth = self.order(values, *descriptors)
            failpoint("controller.ordered_fork")
            with birth.socket:
                return birth.wait()
        finally:
            _set_subreaper(False)

    def exit_code(self, pid: int) -> int:
        """Waits for the end of a child that is not adopted. Returns its exit code, or minus the signal.

        Its process id is then free again. Raises ForkServerLost if the fork server has ended.
        """
        self._send({"reap": pid, "reply": True})
        return int(self._receive()["status"])

    def forget(self, pid: int) -> None:
        """Frees the process id of a child that has ended or is ending, and does not wait for that."""
        self._send({"reap": pid, "reply": False})

    def lost(self) -> ForkServerLost:
        """The error for a socket, its own or a child's, that was closed before anything came."""
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return ForkServerLost("a child ended while it was forked")
        return ForkServerLost(f"exit code {code}" if code >= 0 else signal.Signals(-code).name)

    def close(self) -> None:
        """Ends the fork server. Its children live on."""
        self._control.close()
        # It holds nothing that could be lost.
        self._process.kill()
        self._process.wait()

    def _receive(self) -> dict[str, Any]:
        message = b""
        with suppress(ConnectionResetError):
            message = self._control.recv(LONGEST_MESSAGE)
        if not message:
            raise self.lost()
        values: dict[str, Any] = json.loads(message)
        return values

    def _send(self, values: Mapping[str, Any], *descriptors: int) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._control, [json.dumps(values).encode("ascii")], descriptors)


class Birth:
    """A child that was ordered. `socket` is this end of its birth socket; a child that finds it closed ends."""

    def __init__(self, server: ForkServer, birth_socket: socket.socket) -> None:
        self._server = server
        self.socket = birth_socket

    def wait(self) -> int:
        """The child's process id. Raises ForkServerLost, with how it ended."""
        line = b""
        self.socket.settimeout(_BORN_SECONDS)
        try:
            with suppress(ConnectionResetError):
                while not line.endswith(b"\n") and (byte := self.socket.recv(1)):
                    line += byte
        except TimeoutError as error:
            raise ForkServerLost(f"no answer for {_BORN_SECONDS:.0f} s") from error
        finally:
            self.socket.settimeout(None)
        if not line:
            raise self._server.lost()
        return int(line)


def _set_subreaper(adopts: bool) -> None:
    """Makes this process the parent of its descendants' orphans, or ends that."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)
