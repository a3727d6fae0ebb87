"""A fake stage under the supervisor that every stage is under."""

import logging
import sys
from pathlib import Path

import psutil
import pytest
from support.stages import fake_stage

from configs.schema import SupervisionConfig
from millrace.runtime.messages import Event
from tasks.start import kill, launch, start_command
from tasks.supervise import StageSupervisor

PATIENT = SupervisionConfig(hang_seconds=60.0, start_seconds=60.0)
IMPATIENT = SupervisionConfig(hang_seconds=2.0, start_seconds=60.0)


class Supervised:
    """One fake stage, from start to end."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.log = folder / "train-0.log"
        self.caplog = caplog
        self.told: list[Event] = []
        self.pid = 0

    def run(self, *words: str, supervision: SupervisionConfig = PATIENT) -> None:
        """What `tasks.supervise.supervise` does, but for the choice of the program. Raises what it raises."""
        self._run([sys.executable, fake_stage.__file__, *words], supervision)

    def run_ranks(self, *ranks: str, supervision: SupervisionConfig = PATIENT) -> None:
        """The same of a stage of several ranks, with the words of each."""
        self._run(launch(len(ranks), [fake_stage.__file__, " / ".join(ranks)]), supervision)

    def _run(self, command: list[str], supervision: SupervisionConfig) -> None:
        with self.log.open("ab") as stderr:
            process = start_command(command, stderr, threads=1)
        self.pid = process.pid
        supervisor = StageSupervisor("train-0", process, supervision, logging.getLogger("stage"), self.told.append)
        try:
            supervisor.monitor()
        finally:
            kill(process)
        supervisor.check_exit(self.log)

    def said(self, level: int = logging.INFO) -> list[str]:
        """What its logger got at this level."""
        return [record.getMessage() for record in self.caplog.records if record.levelno == level]


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
