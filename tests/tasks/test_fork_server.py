"""The fork server of the stages: what it forks is as if it had been started, and its own death costs no stage."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest
from support.campaigns.campaigns import REPOSITORY, wait_until
from support.stages import fake_stage, forks_and_waits, starts_a_thread
from support.stages.supervised import is_gone

from millrace.errors import StageDied
from millrace.forking.client import ForkedProcess
from tasks.fork_server import CannotFork, StageForkServer
from tasks.start import kill


@pytest.fixture
def make_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], StageForkServer]]:
    """`make_server(module)`: a fork server that imports this module."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")]))
    made = []

    def make(module: str) -> StageForkServer:
        made.append(StageForkServer())
        made[-1].warm_up([module])
        return made[-1]

    yield make
    for server in made:
        server.close()


class Fork(Protocol):
    def __call__(self, server: StageForkServer, *words: str, warn: Callable[[str], None] = ...) -> ForkedProcess: ...


@pytest.fixture
def fork() -> Iterator[Fork]:
    """`fork(server, word, …)`: a fake stage with these words; a warning fails the test."""
    forked = []

    def one(server: StageForkServer, *words: str, warn: Callable[[str], None] = pytest.fail) -> ForkedProcess:
        with Path(os.devnull).open("ab") as log:
            forked.append(server.fork(fake_stage.__name__, words, log, 2, warn))
        return forked[-1]

    yield one
    for process in forked:
        kill(process)


def servers_of(process: psutil.Process) -> list[psutil.Process]:
    """The fork servers among a process's children."""
    return [child for child in process.children() if "millrace.runtime.fork_server" in command_line(child)]


def command_line(process: psutil.Process) -> list[str]:
    """A process's command line. One that is ending, which is a zombie until it is waited for, has none."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def test_a_forked_stage_is_a_child_of_its_own_with_the_threads_and_the_name_it_would_have(
    make_server: Callable[[str], StageForkServer], fork: Fork
) -> None:
    process = fork(make_server(fake_stage.__name__), "facts")
    facts: dict[str, Any] = json.loads(process.stdout.readline())
    name = psutil.Process(process.pid).cmdline()
    process.stdin.close()
    assert process.wait() == 0
    assert facts == {
        "parent": os.getpid(), "session": process.pid, "group": process.pid, "threads": 1, "omp": "2", "cuda": False,
        # Beside the standard ones there is the listing itself, and nothing of the fork server's.
        "argv": ["facts"], "descriptors": [0, 1, 2, 3],
    }  # fmt: skip
    assert name[1:] == ["-m", fake_stage.__name__, "facts"]


def test_nobody_is_adopted_but_forked_stages(make_server: Callable[[str], StageForkServer], fork: Fork) -> None:
    process = fork(make_server(fake_stage.__name__), "child", "drain")
    orphan = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert psutil.Process(orphan).ppid() != os.getpid()
    kill(process)
    wait_until(lambda: is_gone(orphan), "what the stage started to be gone")


def test_a_fork_server_that_is_killed_costs_no_stage_and_is_back_for_the_next(
    make_server: Callable[[str], StageForkServer], fork: Fork
) -> None:
    others = set(servers_of(psutil.Process()))
    server = make_server(fake_stage.__name__)
    first = fork(server, "drain")
    first.stdout.readline()
    (forks,) = set(servers_of(psutil.Process())) - others
    forks.kill()
    wait_until(lambda: bool(set(servers_of(psutil.Process())) - others - {forks}), "another fork server")
    warnings: list[str] = []
    second = fork(server, "exit:3", warn=warnings.append)
    assert warnings == ["the fork server ended: SIGKILL; it was started again"]
    assert second.wait() == 3
    assert first.poll() is None
    first.terminate()
    assert first.wait() == 75


def test_a_fork_server_that_dies_three_times_within_a_minute_is_given_up_with_its_cause(
    make_server: Callable[[str], StageForkServer], fork: Fork
) -> None:
    server = make_server("support.stages.no_such_module")
    with pytest.raises(StageDied) as died:
        fork(server)
    sentence, *log = str(died.value).splitlines()
    assert sentence == "the fork server of the stages ended 3 times within a minute: exit code 1"
    assert log[-1] == "ModuleNotFoundError: No module named 'support.stages.no_such_module'"


def test_a_module_whose_import_starts_a_thread_is_not_forked_with(
    make_server: Callable[[str], StageForkServer], fork: Fork
) -> None:
    server = make_server(starts_a_thread.__name__)
    for _ in range(2):
        with pytest.raises(CannotFork):
            fork(server)


@pytest.mark.parametrize("killed", ["controller", "fork server and controller"])
def test_a_stage_and_its_fork_server_end_with_their_controller(killed: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])}
    command = [sys.executable, "-m", forks_and_waits.__name__]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None
        try:
            stage = int(controller.stdout.readline())
            # A stage that was just forked has its fork server's name for a moment.
            (forks,) = [found for found in servers_of(psutil.Process(controller.pid)) if found.pid != stage]
            if "fork server" in killed:
                # Stopped first, so that the controller can't start another one.
                controller.send_signal(signal.SIGSTOP)
                forks.kill()
        finally:
            controller.kill()
    wait_until(lambda: is_gone(stage) and is_gone(forks.pid), "the stage and the fork server to be gone")
