"""Stage processes: forked by a fork server that has imported their packages, or started as commands.

warm_up ─► fork server: imports, once ──fork──► a stage that is ready to work, per start and per restart
    ▲           │ dies: started again when the next stage starts
    └───────────┘ three times in a row: given up

Where nothing can be forked, such as on another platform, `start` runs the command `python -m MODULE`.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

from millrace.errors import StageDied
from millrace.forking.client import ForkServer, ForkServerLost
from millrace.forking.exit_causes import last_lines
from storage.failpoints import failpoint

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


class ForkedProcess:
    """A forked child of this process, with the interface of `subprocess.Popen` that a supervisor needs."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it lives."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self) -> int:
        """Waits for its end; returns the same as `poll`."""
        if self.returncode is None:
            # Without collecting it, and so without the lock that a signal takes.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        code = self.poll()
        assert code is not None, "it has ended"
        return code

    def send_signal(self, signal_number: int) -> None:
        """Sends it a signal unless it has ended."""
        # Its process id is its own until `poll` has collected it.
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, signal_number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = subprocess.Popen[bytes] | ForkedProcess
"""A child process with its lifeline as stdin and a pipe for its lines as stdout."""


class StageForkServer:
    """One fork server at a time. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._log: IO[bytes] | None = None
        self._modules: Sequence[str] = ()
        self._loaded = False
        self._refusal = "" if sys.platform == "linux" else f"stages are not forked on {sys.platform}"
        """Why it can't fork stages, if it can't."""

    def warm_up(self, modules: Sequence[str]) -> None:
        """Starts it unless it runs already. It imports these modules in the background."""
        with self._lock:
            if self._server is None and not self._refusal:
                self._modules = modules
                self._start()

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        stderr: IO[bytes],
        threads: int,
        warn: Callable[[str], None] = lambda line: None,
        environment: Mapping[str, str] | None = None,
    ) -> Process:
        """Starts a process that runs `python -m MODULE ARGUMENTS`, as `start_command` does; forks it if it can.

        CUDA's variables in `environment` are read later. `warn` gets a sentence if the process is not forked, and if
        the fork server has died and is started again. Raises StageDied, with the end of the fork server's log, if it
        dies three times in a row.
        """
        environment = dict(environment or {})
        self.warm_up([module])
        cause = ""
        with self._lock:
            for _ in range(_MAX_DEATHS):
                server = None if self._refusal else self._server or self._start()
                try:
                    if server is None or not self._can_fork(server):
                        warn(f"{module} is started without the fork server: {self._refusal}")
                        return start_command([sys.executable, "-m", module, *arguments], stderr, threads, environment)
                    order = {"module": module, "arguments": [*arguments], "threads": threads}
                    return _fork(server, {**order, "environment": environment}, stderr)
                except (ForkServerLost, TimeoutError) as error:
                    cause = str(error)
                    self._end()
                    warn(f"the fork server ended: {cause}; it is started again")
            assert self._log is not None, "it was started"
            sentence = f"the fork server of the stages ended {_MAX_DEATHS} times in a row: {cause}"
            raise StageDied(f"{sentence}\n{last_lines(self._log)}")

    def close(self) -> None:
        """Ends it. The stages live on until their supervisors end them."""
        with self._lock:
            self._end()

    def _start(self) -> ForkServer:
        self._loaded = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 — read when the fork server has died
        self._server = ForkServer(
            [sys.executable, "-m", "millrace.forking.stage_server"],
            {"modules": list(self._modules)},
            environment={**os.environ, **STAGE_ENVIRONMENT},
            log=self._log,
        )
        return self._server

    def _can_fork(self, server: ForkServer) -> bool:
        """Waits until the fork server has its imports. Ends it for good if its children would not work."""
        if not self._loaded:
            extra = server.loaded(_LOAD_SECONDS)["threads"] - 1
            self._loaded = True
            if extra:
                self._refusal = f"importing its packages started {extra} thread{'s' * (extra > 1)}"
                self._end()
        return not self._refusal

    def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None


def _fork(server: ForkServer, order: Mapping[str, object], stderr: IO[bytes]) -> ForkedProcess:
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


def start_command(
    command: Sequence[str], stderr: IO[bytes], threads: int, environment: Mapping[str, str] | None = None
) -> Process:
    """Starts a stage process with a lifeline, a pipe for its lines, and this many threads for its computation.

    `environment`: variables added to those of this process.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        # Outside the terminal's process group: Ctrl-C reaches only the controller, which then drains the stages.
        start_new_session=True,
        env={**os.environ, **STAGE_ENVIRONMENT, "OMP_NUM_THREADS": str(threads), **(environment or {})},
    )


def kill(process: Process) -> None:
    """Kills the process and everything it started, so that nothing outlives its supervisor."""
    if process.poll() is None:
        process.kill()
    process.wait()
    with suppress(ProcessLookupError):
        # The stage leads its own session, so its children are in its process group: vLLM's engine and workers.
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
