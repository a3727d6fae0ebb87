"""One stage process, from start to exit code: started, heard, drained, never left behind.

    supervise ──Popen, own session──► python -m millrace.stages.<stage>
        │   ◄──stdout: milestones, events, beats
        │   ──silent too long: SIGUSR1, then KILL──►  stacks ─► log
        │   ──STOP: SIGTERM, later KILL──►  stderr ─► logs/<stage>-<replica>.log
        └── stdin: lifeline, ends with this process, however it ends

A trainer of several ranks is started by `millrace.parallel.launch`, which is the process supervised then: it passes the
signals on, and ends as its ranks did. Every wait is short and on STOP, so that Prefect can deliver a cancellation or
SIGTERM at any time.
"""

import hashlib
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from prefect import get_run_logger
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from configs.schema import RunConfig, SupervisionConfig
from millrace.errors import InputError, LedgerMismatch, StageDied
from millrace.events import Beat, Event, read_line
from millrace.exits import DRAINED, FENCED, LAST_WORDS, MISCOUNTED, MISTAKE, SHOW_STACKS
from millrace.run import read_attempt
from millrace.stages.arguments import StageArguments
from storage import layout
from storage.errors import Fenced
from storage.factory import open_store
from tasks.causes import OomKills, cause, oom_counters, with_last_lines
from tasks.events import emit
from tasks.restarts import keep_going, lives_of
from tasks.silence import Silence
from tasks.stop import STOP

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 20.0
"""From SIGTERM to SIGKILL; Prefect's own grace, 30 s, comes after it."""
_STACKS_SECONDS = 1.0
"""For a stage that hangs to write down where; one that can answer does so at once."""
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    # gloo writes a C++ backtrace whenever a peer goes away, which is nothing unusual here.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}

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
    """Runs one stage process until it is done or drained. Call it in a task that is declared by `STAGE_TASK`.

    Raises InputError with the stage's own sentence after a person's mistake, Fenced where another process took its
    work over, and StageDied, naming the cause and the last lines of its log, after anything else, such as a hang.
    """
    name, run_url = f"{stage}-{arguments.replica}", arguments.run_url
    config = RunConfig.model_validate(read_attempt(open_store(run_url), arguments.attempt).config)
    log = _log_path(stage, arguments)
    log.parent.mkdir(parents=True, exist_ok=True)
    lives = lives_of(str(task_run.id))
    if lives.restarts:
        emit("stage.restarted", run_url, {"stage": name, "cause": lives.cause, "restarts": lives.restarts})
    with log.open("ab") as stderr:
        process = start(_command(stage, arguments, config), stderr, threads)
    try:
        attendant = Attendant(
            name, process, config.supervision, get_run_logger(), lambda event: emit(event.kind, run_url, event.payload)
        )
        attendant.attend()
    finally:
        kill(process)
    lives.lived(attendant.silence.at_work_seconds, config.supervision.hang_seconds)
    attendant.judge(log)


def _command(stage: str, arguments: StageArguments, config: RunConfig) -> list[str]:
    program = ["-m", f"millrace.stages.{stage}", *arguments.as_argv()]
    num_ranks = config.training.parallel.data * config.training.parallel.tensor
    return [sys.executable, *program] if stage != "train" or num_ranks == 1 else launch(num_ranks, program)


def launch(num_ranks: int, program: list[str]) -> list[str]:
    """The command that runs `python PROGRAM` as so many ranks; their launcher is the process to supervise."""
    return [sys.executable, "-m", "millrace.parallel.launch", str(num_ranks), *program]


def start(command: list[str], stderr: IO[bytes], threads: int) -> subprocess.Popen[bytes]:
    """Starts a stage process with a lifeline, a pipe for its lines, and so many threads for its mathematics."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        # Out of the terminal's group: Ctrl-C reaches the controller alone, which then drains the stages.
        start_new_session=True,
        env={**os.environ, **_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)},
    )


def kill(process: subprocess.Popen[bytes]) -> None:
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


class Attendant:
    """Hears one stage process, and says how it ended. `logger` gets what is for people, `tell` what happened."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        supervision: SupervisionConfig,
        logger: "logging.Logger | logging.LoggerAdapter[Any]",
        tell: Callable[[Event], None],
    ) -> None:
        now = time.monotonic()
        self.silence = Silence(
            started=now, hang_seconds=supervision.hang_seconds, start_seconds=supervision.start_seconds
        )
        self._name = name
        self._process = process
        self._logger = logger
        self._tell = tell
        self._lines: queue.Queue[Beat | Event | str] = queue.Queue()
        self._last_milestone = ""
        self._oom_kills = OomKills(oom_counters(), now)
        # Why this process was killed, where it was we who did it.
        self._sentence = ""

    def attend(self) -> None:
        """Until the process ends, or hangs: passes on what it says, and drains it once STOP is set."""
        listener = threading.Thread(target=self._listen, daemon=True)
        listener.start()
        while self._process.poll() is None and not STOP.wait(_POLL_SECONDS):
            self._pass_on()
            self._oom_kills.look(time.monotonic())
            if self.silence.look(time.monotonic()):
                self._end_the_hung()
                return
        self._drain()
        listener.join(timeout=1)
        self._pass_on()

    def judge(self, log: Path) -> None:
        """Raises the error that the way it ended stands for, if it does; `log` is where the process wrote to."""
        code = self._process.returncode
        # A stage told to stop before it could listen dies of the signal: it had not begun.
        if code == 0 or (STOP.is_set() and code in (DRAINED, -signal.SIGTERM)):
            return
        if code == MISTAKE:
            raise InputError(self._last_milestone.removeprefix(LAST_WORDS))
        if code == FENCED:
            raise Fenced(self._last_milestone.removeprefix(LAST_WORDS))
        if code == MISCOUNTED:
            raise LedgerMismatch(self._last_milestone.removeprefix(LAST_WORDS))
        found = self._sentence or f"{self._name} {cause(code, out_of_memory=self._oom_kills.happened())}"
        raise StageDied(with_last_lines(found, log))

    def _drain(self) -> None:
        """Asks it to stop; it may take its time, but not for ever."""
        if self._process.poll() is None:
            self._process.terminate()
        deadline = time.monotonic() + _GRACE_SECONDS
        while self._process.poll() is None:
            self._pass_on()
            time.sleep(_POLL_SECONDS)
            if time.monotonic() > deadline:
                self._sentence = (
                    f"{self._name} was asked to stop, and killed when it had not after {_GRACE_SECONDS:.0f} s"
                )
                self._process.kill()
                self._process.wait()

    def _end_the_hung(self) -> None:
        silence = self.silence
        self._sentence = (
            f"{self._name} hangs: it has shown no sign of progress for {silence.seconds:.0f} s, "
            f"when it was at: {silence.doing}"
        )
        self._logger.error("%s; it is killed", self._sentence)
        payload = {"stage": self._name, "seconds": round(silence.seconds, 1), "doing": silence.doing}
        self._tell(Event(kind="stage.hung", payload=payload))
        self._process.send_signal(SHOW_STACKS)
        STOP.wait(_STACKS_SECONDS)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # What a process was writing when it was killed may break off.
            with suppress(ValueError, KeyError):
                self._lines.put(read_line(line.decode(errors="replace").rstrip()))

    def _pass_on(self) -> None:
        while not self._lines.empty():
            match self._lines.get():
                case Beat() as beat:
                    self.silence.hear(beat)
                case Event() as event:
                    self._tell(event)
                case str(milestone):
                    self._last_milestone = milestone
                    self._logger.info(milestone)


def _log_path(stage: str, arguments: StageArguments) -> Path:
    """In the run where that is on this machine, else among this machine's temporary files."""
    name = layout.log_file(stage, arguments.replica)
    run = hashlib.sha256(arguments.run_url.encode()).hexdigest()[:16]
    elsewhere = Path(tempfile.gettempdir()) / f"millrace-{os.getuid()}" / run / name
    return open_store(arguments.run_url).local_path(name) or elsewhere
