"""The fork server that this process's stages come from: started once, and again whenever it dies.

warm_up ─► fork server: imports, once ──fork──► a stage that is ready to work, per start and per restart
    ▲           │ dies
    └───────────┘  three times within a minute: given up
"""

import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO

from millrace.errors import StageDied
from millrace.forking.client import ForkedProcess, ForkServer, ForkServerLost
from storage.failpoints import failpoint

STAGE_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    # gloo writes a C++ backtrace whenever a peer leaves, which is normal here.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Environment variables of every stage process."""
_LOAD_SECONDS = 300.0
"""For importing packages; some take minutes on a cold disk."""
_MAX_DEATHS, _WINDOW_SECONDS = 3, 60.0
_LAST_LINES = 15


class CannotFork(RuntimeError):
    """Stages can't be forked here, for the reason that this says."""


class StageForkServer:
    """One fork server at a time. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._log: IO[bytes] | None = None
        self._loaded = False
        self._modules: tuple[str, ...] = ()
        self._deaths: deque[float] = deque(maxlen=_MAX_DEATHS)
        self._cause = ""
        """Why it died last, until somebody was told."""
        self._given_up = False
        self._refusal = "" if sys.platform == "linux" else f"stages are not forked on {sys.platform}"
        """Why it can't fork stages, if it can't."""

    def warm_up(self, modules: Sequence[str]) -> None:
        """Starts it unless it runs already. It imports these modules while the caller goes on."""
        with self._lock:
            if self._server is None and not self._given_up and not self._refusal:
                self._modules = tuple(modules)
                self._start()

    def fork(
        self, module: str, arguments: Sequence[str], stderr: IO[bytes], threads: int, warn: Callable[[str], None]
    ) -> ForkedProcess:
        """A process that runs `python -m MODULE ARGUMENTS` with a lifeline, a pipe for its lines, and so many threads.

        If the fork server has died, it is started again, and `warn` gets a sentence. Raises CannotFork, and StageDied
        if it has died three times within a minute.
        """
        self.warm_up([module])
        with self._lock:
            process = None
            while self._server is not None and process is None:
                try:
                    self._wait_until_loaded(self._server)
                    process = self._fork(self._server, module, arguments, stderr, threads)
                except (ForkServerLost, TimeoutError) as error:
                    self._replace(str(error))
            if self._refusal:
                raise CannotFork(self._refusal)
            if self._given_up:
                raise StageDied(self._cause)
            if self._cause:
                warn(f"the fork server ended: {self._cause}; it was started again")
                self._cause = ""
        assert process is not None, "neither refused nor given up"
        return process

    def close(self) -> None:
        """Ends it. The stages live on until their supervisors end them."""
        with self._lock:
            if self._server is not None:
                self._server.close()
            self._server, self._given_up, self._cause = None, False, ""
            self._deaths.clear()

    def _wait_until_loaded(self, server: ForkServer) -> None:
        """Raises CannotFork, and ends the fork server, if a child of it would not work."""
        if self._loaded:
            return
        extra = server.loaded(_LOAD_SECONDS)["threads"] - 1
        if extra:
            self._refusal = f"importing its packages started {extra} thread{'s' * (extra > 1)}"
            self._server = None
            server.close()
            raise CannotFork(self._refusal)
        self._loaded = True

    def _fork(
        self, server: ForkServer, module: str, arguments: Sequence[str], stderr: IO[bytes], threads: int
    ) -> ForkedProcess:
        read_end, stdin = os.pipe()
        stdout, write_end = os.pipe()
        order = {"module": module, "arguments": list(arguments), "threads": threads}
        birth = server.order(order, read_end, write_end, stderr.fileno())
        os.close(read_end)
        os.close(write_end)
        failpoint("controller.ordered_fork")
        try:
            pid = birth.wait()
        except BaseException:
            os.close(stdin)
            os.close(stdout)
            raise
        finally:
            birth.close()
        failpoint("controller.forked")
        return ForkedProcess(pid, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"))

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 — read when the fork server has died
        self._loaded = False
        self._server = ForkServer(
            [sys.executable, "-m", "millrace.runtime.fork_server"],
            {"modules": self._modules},
            adopts=True,
            environment={**os.environ, **STAGE_ENVIRONMENT},
            log=self._log,
        )
        threading.Thread(target=self._watch, args=(self._server,), name="fork server", daemon=True).start()

    def _watch(self, server: ForkServer) -> None:
        """Replaces a fork server that dies at once, so that its successor is warm when a stage needs it."""
        cause = server.ending()
        with self._lock:
            if self._server is server:
                self._replace(cause)

    def _replace(self, cause: str) -> None:
        """Starts another one in place of one that has died, unless too many have."""
        assert self._server is not None
        self._server.close()
        self._server, self._cause = None, cause
        now = time.monotonic()
        self._deaths.append(now)
        if len(self._deaths) == _MAX_DEATHS and now - self._deaths[0] < _WINDOW_SECONDS:
            self._given_up = True
            self._cause = (
                f"the fork server of the stages ended {_MAX_DEATHS} times within a minute: {cause}{self._said()}"
            )
        else:
            self._start()

    def _said(self) -> str:
        """The end of what the fork server wrote to standard error, if anything."""
        assert self._log is not None
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        return "\n".join(["", *said])


STAGES = StageForkServer()
"""The fork server of this process."""
