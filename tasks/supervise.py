"""Supervises one stage process from start to exit: starts it, listens to it, drains it, and never leaves it behind.

    supervise ──start, own session──► python -m millrace.stages.<stage>
        │   ◄──stdout: milestones, events, heartbeats, the error that it ends with
        │   ──silent too long: SIGUSR1, then SIGKILL──►  stacks ─► log
        │   ──STOP: SIGTERM, later SIGKILL──►  stderr ─► logs/<stage>-<replica>.log
        └── stdin: lifeline, closed when this process ends for any reason

A trainer of several ranks is started by `millrace.runtime.launcher`. The launcher is then the supervised
process: it forwards signals and exits as its ranks did. So is the launcher of each host of a trainer over several
(`millrace.runtime.host_launcher`). All waits are short or on STOP, so that Prefect can deliver a
cancellation or SIGTERM at any time.
"""

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from configs.operation import SupervisionConfig
from millrace.errors import DRAINED, StageDied, exit_code
from millrace.forking.exit_causes import OomKills, cause, last_lines
from millrace.forking.stages import Process, kill
from millrace.runs.record import read_attempt
from millrace.runtime.arguments import StageArguments, attempt_config
from millrace.runtime.devices import gpus
from millrace.runtime.messages import SHOW_STACKS, Event, Heartbeat, Message, read_line
from storage import layout
from storage.stores.factory import open_store
from tasks.events import emit
from tasks.hang_detector import HangDetector
from tasks.restart_budget import own_budget
from tasks.start import log_path, start_stage
from tasks.stop import STOP, STOP_NOW

_POLL_SECONDS = 0.1
_END_POLL_SECONDS = 0.005
"""Once the process has closed its pipe, which it does when it ends."""
_GRACE_SECONDS = 20.0
"""From SIGTERM to SIGKILL for a stage that has nothing to lose; `supervision.drain_seconds` for the others."""
_COMMITTING = frozenset({"train", "generate", "score", "teach", "sync_weights"})
"""Stages that drain: they finish their unit of work and commit it. Killed ones of the other stages are repeated."""
_STACKS_SECONDS = 1.0
"""Time for a hung stage to write its stacks; one that still can does so at once."""


def supervise(stage: str, arguments: StageArguments, *, threads: int) -> str:
    """Runs one stage process until it is done or drained, and returns the last milestone that it reported, if any.

    Call it in a task declared with `STAGE_TASK`.

    Raises the stage's own error if its exit code is that error's (`millrace.errors`), and StageDied with the cause and
    the end of the log after anything else, such as a hang.
    """
    name, run_url = f"{stage}-{arguments.replica}", arguments.run_url
    store = open_store(run_url)
    config = attempt_config(read_attempt(store, arguments.attempt))
    log = log_path(store, layout.log_file(stage, arguments.replica))
    log.parent.mkdir(parents=True, exist_ok=True)
    budget = own_budget(name, run_url)
    logger = get_run_logger()
    with log.open("ab") as stderr:
        process = start_stage(stage, arguments, config, stderr, threads, logger.warning)
    if arguments.devices:
        logger.info("%s on %s", name, gpus(arguments.devices))
    try:
        supervisor = StageSupervisor(
            name, process, config.supervision, logger, lambda event: emit(event.kind, run_url, event.payload)
        )
        supervisor.monitor()
    finally:
        kill(process)
    budget.add_work(supervisor.hang_detector.at_work_seconds, supervisor.hang_detector.hang_seconds)
    supervisor.check_exit(log)
    return supervisor.last_milestone


class StageSupervisor:
    """Listens to one stage process. `logger` gets its milestones, `emit_event` its events."""

    def __init__(
        self,
        name: str,
        process: Process,
        supervision: SupervisionConfig,
        logger: "logging.Logger | logging.LoggerAdapter[Any]",
        emit_event: Callable[[Event], None],
    ) -> None:
        now = time.monotonic()
        # An evaluation gets what processor time the others leave, so a layer may take minutes.
        in_idle_time = name.rpartition("-")[0] == "evaluate"
        self.hang_detector = HangDetector(
            started=now,
            hang_seconds=None if in_idle_time else supervision.hang_seconds,
            start_seconds=supervision.start_seconds,
        )
        self._name = name
        self._drain_seconds = supervision.drain_seconds
        self._process = process
        self._logger = logger
        self._emit_event = emit_event
        # None: the process has closed its pipe, so it has ended or is about to.
        self._lines: queue.Queue[Message | None] = queue.Queue()
        # By exit code: the other ranks of a trainer report theirs too.
        self._errors: dict[int | None, Exception] = {}
        self.last_milestone = ""
        """The stage's latest milestone; empty before the first."""
        self._oom_kills = OomKills(now)
        self._poll_seconds = _POLL_SECONDS
        # Why the supervisor killed the process, if it did.
        self._why_killed = ""
        # Whether it was killed while it drained, with nothing to lose.
        self._was_given_up = False

    def monitor(self) -> None:
        """Forwards the reports of the process until it ends or hangs, and drains it once STOP is set."""
        listener = threading.Thread(target=self._listen, daemon=True)
        listener.start()
        while self._process.poll() is None and not STOP.is_set():
            self._forward(self._poll_seconds)
            now = time.monotonic()
            self._oom_kills.look(now)
            if self.hang_detector.hangs(now):
                self._report_hang()
                return
        self._drain()
        listener.join(timeout=1)
        self._forward()

    def check_exit(self, log: Path) -> None:
        """Raises the error that the exit code stands for, if any; `log` is the process's log."""
        code = self._process.wait()
        # A stage that gets SIGTERM before it has installed its handler dies of the signal. It had not begun.
        if code == 0 or (STOP.is_set() and code in (DRAINED, -signal.SIGTERM)) or self._was_given_up:
            return
        if code in self._errors:
            raise self._errors[code]
        why = self._why_killed or f"{self._name} {cause(code, out_of_memory=self._oom_kills.happened())}"
        with log.open("rb") as file:
            raise StageDied(f"{why}\nthe end of {log}:\n{last_lines(file)}")

    def _drain(self) -> None:
        """Sends SIGTERM, and kills the process if it takes too long, hangs, or STOP_NOW is set."""
        if self._process.poll() is None:
            self._process.terminate()
        drain_started = time.monotonic()
        while self._process.poll() is None:
            self._forward(self._poll_seconds)
            now = time.monotonic()
            if self.hang_detector.hangs(now):
                self._report_hang()
            elif STOP_NOW.is_set() or now - drain_started > self._seconds_to_drain():
                self._why_killed = (
                    f"{self._name} was asked to stop, and killed after {now - drain_started:.0f} s; last activity: "
                    f"{self.hang_detector.doing}"
                )
            if self._why_killed:
                self._process.kill()
                self._process.wait()
                if self._name.rpartition("-")[0] in _COMMITTING:
                    self._emit_event(
                        Event(kind="stage.killed", payload={"stage": self._name, "sentence": self._why_killed})
                    )
                else:
                    self._was_given_up = True
                    self._logger.info("%s; the next attempt repeats its work", self._why_killed)

    def _seconds_to_drain(self) -> float:
        works = self.hang_detector.is_at_work and self._name.rpartition("-")[0] in _COMMITTING
        return self._drain_seconds if works else min(self._drain_seconds, _GRACE_SECONDS)

    def _report_hang(self) -> None:
        seconds, doing = self.hang_detector.silent_seconds, self.hang_detector.doing
        self._why_killed = (
            f"{self._name} hangs: no sign of progress for {seconds:.0f} s; last activity: {doing}; the limit is "
            f"supervision.{self.hang_detector.limit}"
        )
        self._logger.error("%s; it is killed", self._why_killed)
        payload = {"stage": self._name, "seconds": round(seconds, 1), "doing": doing}
        self._emit_event(Event(kind="stage.hung", payload=payload))
        self._process.send_signal(SHOW_STACKS)
        (STOP_NOW if STOP.is_set() else STOP).wait(_STACKS_SECONDS)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # The last line of a killed process may be incomplete.
            with suppress(ValueError, KeyError):
                self._lines.put(read_line(line.decode(errors="replace").rstrip()))
        self._lines.put(None)

    def _forward(self, seconds: float = 0.0) -> None:
        """Forwards the lines that have arrived, after waiting `seconds` at most for the first."""
        with suppress(queue.Empty):
            self._dispatch(self._lines.get(timeout=seconds))
            while True:
                self._dispatch(self._lines.get_nowait())

    def _dispatch(self, line: Message | None) -> None:
        match line:
            case Heartbeat() as heartbeat:
                self.hang_detector.record(heartbeat)
            case Event() as event:
                self._emit_event(event)
            case Exception() as error:
                self._errors[exit_code(error)] = error
                self._logger.error("%s", error)
            case str(milestone):
                self.last_milestone = milestone
                self._logger.info(milestone)
            case None:
                self._poll_seconds = _END_POLL_SECONDS
