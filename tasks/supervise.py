"""One stage process, from start to exit code: started, heard, drained, never left behind.

    supervise ──Popen, own session──► python -m millrace.stages.<stage>
        │   ◄──stdout: milestones──        │
        │   ──STOP: SIGTERM, later KILL──► │ stderr ─► logs/<stage>-<replica>.log
        └── stdin: lifeline, ends with this process, however it ends

Every wait is short and on STOP, so that Prefect can deliver a cancellation or SIGTERM at any time.
"""

import hashlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from prefect import get_run_logger
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from millrace.errors import InputError, LedgerMismatch, StageDied
from millrace.exits import DRAINED, FENCED, LAST_WORDS, MISCOUNTED, MISTAKE
from millrace.stages.arguments import StageArguments
from storage import layout
from storage.errors import Fenced
from storage.factory import open_store
from tasks.stop import STOP

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 20.0
"""From SIGTERM to SIGKILL; Prefect's own grace, 30 s, comes after it."""
_LAST_LINES = 15
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    # gloo writes a C++ backtrace whenever a peer goes away, which is nothing unusual here.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_MOST_DEATHS, _WITHIN_SECONDS = 3, 60.0
"""A stage that died so often in so short a time is not helped by another start."""
_deaths: dict[str, list[float]] = defaultdict(list)
"""When each stage task of this process failed, by its name."""


def keep_going(task: Task[Any, Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Whether a stage that failed deserves another try.

    Not when the campaign ends, nor after a person's mistake; nor once another controller took the run over, for two
    that restart their stages would fence each other for ever. Nor where it dies again and again.
    """
    error = state.result(raise_on_failure=False)
    if STOP.is_set() or isinstance(error, InputError | Fenced | LedgerMismatch):
        return False
    now = time.monotonic()
    _deaths[task_run.name] = recent = [t for t in _deaths[task_run.name] if now - t < _WITHIN_SECONDS] + [now]
    return len(recent) < _MOST_DEATHS


STAGE_TASK: dict[str, Any] = {
    # `keep_going` decides; a campaign of weeks may lose a stage now and then.
    "retries": 100_000,
    "retry_delay_seconds": 0,
    "retry_condition_fn": keep_going,
    "cache_policy": NO_CACHE,
    "persist_result": False,
}
"""How every stage is declared as a Prefect task."""


def supervise(stage: str, arguments: StageArguments, *, threads: int) -> None:
    """Runs one stage process until it is done or drained.

    Raises InputError with the stage's own sentence after a person's mistake, Fenced where another process took its
    work over, and StageDied, naming the cause and the last lines of its log, after anything else.
    """
    log = _log_path(stage, arguments)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", f"millrace.stages.{stage}", *arguments.as_argv()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            # Out of the terminal's group: Ctrl-C reaches the controller alone, which then drains the stages.
            start_new_session=True,
            env={**os.environ, **_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)},
        )
    try:
        last_milestone = _attend(process, get_run_logger().info)
    finally:
        _kill(process)
    _judge(f"{stage}-{arguments.replica}", process.returncode, last_milestone, log)


def _attend(process: subprocess.Popen[bytes], say: Callable[[str], None]) -> str:
    """Until the process ends: passes its milestones on, and drains it once STOP is set. Returns the last milestone."""
    assert process.stdout is not None
    lines: queue.Queue[str] = queue.Queue()
    listener = threading.Thread(target=_listen, args=(process.stdout, lines), daemon=True)
    listener.start()
    last = ""
    deadline: float | None = None
    while process.poll() is None:
        last = _pass_on(lines, say, last)
        if not STOP.wait(_POLL_SECONDS):
            continue
        if deadline is None:
            deadline = time.monotonic() + _GRACE_SECONDS
            process.terminate()
        elif time.monotonic() > deadline:
            process.kill()
        time.sleep(_POLL_SECONDS)
    listener.join(timeout=1)
    return _pass_on(lines, say, last)


def _listen(stdout: IO[bytes], lines: queue.Queue[str]) -> None:
    for line in stdout:
        lines.put(line.decode(errors="replace").rstrip())


def _pass_on(lines: queue.Queue[str], say: Callable[[str], None], last: str) -> str:
    while not lines.empty():
        last = lines.get()
        say(last)
    return last


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Nothing outlives its supervisor, nor what the process itself started."""
    if process.poll() is None:
        process.kill()
    process.wait()
    with suppress(ProcessLookupError):
        # The stage has led a session of its own, so its children are in its process group: vLLM's engine and workers.
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _judge(name: str, code: int, last_milestone: str, log: Path) -> None:
    # A stage told to stop before it could listen dies of the signal: it had not begun.
    if code == 0 or (STOP.is_set() and code in (DRAINED, -signal.SIGTERM)):
        return
    if code == MISTAKE:
        raise InputError(last_milestone.removeprefix(LAST_WORDS))
    if code == FENCED:
        raise Fenced(last_milestone.removeprefix(LAST_WORDS))
    if code == MISCOUNTED:
        raise LedgerMismatch(last_milestone.removeprefix(LAST_WORDS))
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    raise StageDied("\n".join([f"{name} {cause}; the end of {log}:", *lines]))


def _log_path(stage: str, arguments: StageArguments) -> Path:
    """In the run where that is on this machine, else among this machine's temporary files."""
    name = layout.log_file(stage, arguments.replica)
    run = hashlib.sha256(arguments.run_url.encode()).hexdigest()[:16]
    elsewhere = Path(tempfile.gettempdir()) / f"millrace-{os.getuid()}" / run / name
    return open_store(arguments.run_url).local_path(name) or elsewhere
