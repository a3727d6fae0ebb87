"""A fake stage under the supervisor that every stage is under."""

import logging
import sys
from pathlib import Path

import psutil
import pytest
from support.stages import fake_stage

from configs.operation import SupervisionConfig
from millrace.forking.stages import Process, StageForkServer, kill, start_command
from millrace.runtime.messages import Event
from tasks.start import launch
from tasks.supervise import StageSupervisor

PATIENT = SupervisionConfig(hang_seconds=60.0)
IMPATIENT = SupervisionConfig(hang_seconds=2.0)


class Supervised:
    """One fake stage, from start to end: forked, or started as a command without a fork server."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture, fork_server: StageForkServer | None) -> None:
        self.log = folder / "train-0.log"
        self.caplog = caplog
        self.told: list[Event] = []
        self.name = "train-0"
        self.pid = 0
        self._fork_server = fork_server

    def run(self, *words: str, supervision: SupervisionConfig = PATIENT) -> None:
        """Does and raises the same as `tasks.supervise.supervise`, with a fake stage as the program."""
        with self.log.open("ab") as stderr:
            if self._fork_server is None:
                process = start_command([sys.executable, fake_stage.__file__, *words], stderr, threads=1)
            else:
                process = self._fork_server.start(fake_stage.__name__, words, stderr, 1, pytest.fail)
        self._supervise(process, supervision)

    def run_ranks(self, *ranks: str, supervision: SupervisionConfig = PATIENT) -> None:
        """The same of a stage of several ranks, with the words of each."""
        command = launch(len(ranks), [fake_stage.__file__, " / ".join(ranks)])
        with self.log.open("ab") as stderr:
            process = start_command(command, stderr, threads=1)
        self._supervise(process, supervision)

    def _supervise(self, process: Process, supervision: SupervisionConfig) -> None:
        self.pid = process.pid
        supervisor = StageSupervisor(self.name, process, supervision, logging.getLogger("stage"), self.told.append)
        try:
            supervisor.monitor()
        finally:
            kill(process)
        supervisor.check_exit(self.log)

    def said(self, level: int = logging.INFO) -> list[str]:
        """The logged messages of this level."""
        return [record.getMessage() for record in self.caplog.records if record.levelno == level]


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
