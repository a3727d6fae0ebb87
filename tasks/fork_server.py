"""The fork server that this process's stages come from: started once, and again when it has died.

warm_up ─► fork server: imports, once ──fork──► a stage that is ready to work, per start and per restart
    ▲           │ dies: started again when the next stage starts
    └───────────┘ three times in a row: given up
"""

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from millrace.errors import StageDied
from millrace.forking.client import ForkedProcess, ForkServer, ForkServerLost
from storage.failpoints import failpoint
from tasks.exit_causes import last_lines

STAGE_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    # gloo writes a C++ backtrace whenever a peer leaves, which is normal here.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # glibc returns large blocks to the kernel when they are freed. A training step frees the same ones every time, and
    # the first use of each page costs a page fault: about a tenth of the time of a step of 512 short responses. Blocks
    # above 8 MiB take long to compute, and page faults hardly count.
    "MALLOC_MMAP_THRESHOLD_": str(8 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}
"""Environment variables of every stage process."""
_LOAD_SECONDS = 300.0
"""For importing packages; some take minutes on a cold disk."""
_MAX_DEATHS = 3


class CannotFork(RuntimeError):
    """Stages can't be forked here, for the reason in the message."""


class StageForkServer:
    """One fork server at a time. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 — read when the fork server has died
        self._loaded = False
        self._modules: Sequence[str] = ()
        self._refusal = "" if sys.platform == "linux" else f"stages are not forked on {sys.platform}"
        """Why it can't fork stages, if it can't."""

    def warm_up(self, modules: Sequence[str]) -> None:
        """Starts it unless it runs already. It imports these modules in the background."""
        with self._lock:
            if self._server is None and not self._refusal:
                self._modules = modules
                self._start()

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        stderr: IO[bytes],
        threads: int,
        warn: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
    ) -> ForkedProcess:
        """Forks a process that runs `python -m MODULE ARGUMENTS` with a lifeline, a pipe for its lines, and `threads`.

        `environment`: variables of its own; CUDA's are read later. If the fork server has died, it is started again,
        and `warn` gets a sentence. Raises CannotFork, and StageDied with the end of its log if it dies three times in a
        row.
        """
        self.warm_up([module])
        cause = ""
        with self._lock:
            for _ in range(_MAX_DEATHS):
                if self._refusal:
                    raise CannotFork(self._refusal)
                server = self._server or self._start()
                try:
                    self._wait_until_loaded(server)
                    order = {"module": module, "arguments": list(arguments), "threads": threads}
                    return self._fork(server, {**order, "environment": dict(environment or {})}, stderr)
                except (ForkServerLost, TimeoutError) as error:
                    cause = str(error)
                    server.close()
                    self._server = None
                    warn(f"the fork server ended: {cause}; it is started again")
            self._log.seek(0)
            raise StageDied(
                f"the fork server of the stages ended {_MAX_DEATHS} times in a row: {cause}\n"
                f"{last_lines(self._log.read())}"
            )

    def close(self) -> None:
        """Ends it. The stages live on until their supervisors end them."""
        with self._lock:
            if self._server is not None:
                self._server.close()
            self._server = None

    def _start(self) -> ForkServer:
        self._log.seek(0)
        self._log.truncate()
        self._loaded = False
        self._server = ForkServer(
            [sys.executable, "-m", "millrace.runtime.fork_server"],
            {"modules": list(self._modules)},
            environment={**os.environ, **STAGE_ENVIRONMENT},
            log=self._log,
        )
        return self._server

    def _wait_until_loaded(self, server: ForkServer) -> None:
        """Raises CannotFork, and ends the fork server, if its children would not work."""
        if self._loaded:
            return
        extra = server.loaded(_LOAD_SECONDS)["threads"] - 1
        if extra:
            self._refusal = f"importing its packages started {extra} thread{'s' * (extra > 1)}"
            self._server = None
            server.close()
            raise CannotFork(self._refusal)
        self._loaded = True

    def _fork(self, server: ForkServer, order: Mapping[str, Any], stderr: IO[bytes]) -> ForkedProcess:
        read_end, stdin = os.pipe()
        stdout, write_end = os.pipe()
        try:
            pid = server.adopt(order, read_end, write_end, stderr.fileno())
        except BaseException:
            os.close(stdin)
            os.close(stdout)
            raise
        finally:
            os.close(read_end)
            os.close(write_end)
        failpoint("controller.forked")
        return ForkedProcess(pid, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"))


STAGES = StageForkServer()
"""The fork server of this process."""
