"""The fork server of the stages: forked processes behave like started ones, and outlive it."""

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
from millrace.forking.stages import STAGES, ForkedProcess, StageForkServer, kill
from millrace.preflight.child import ask, ask_in_background


@pytest.fixture
def make_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], StageForkServer]]:
    """`make_server(module)`: a fork server that imports this module."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")]))
    servers = []

    def make(module: str) -> StageForkServer:
        servers.append(StageForkServer())
        servers[-1].warm_up([module])
        return servers[-1]

    yield make
    for server in servers:
        server.close()


class Fork(Protocol):
    def __call__(self, server: StageForkServer, *words: str, warn: Callable[[str], None] = ...) -> ForkedProcess: ...


@pytest.fixture
def fork() -> Iterator[Fork]:
    """`fork(server, word, …)`: a fake stage with these words; a warning fails the test."""
    forked = []

    def fork_stage(server: StageForkServer, *words: str, warn: Callable[[str], None] = pytest.fail) -> ForkedProcess:
        with Path(os.devnull).open("ab") as log:
            process = server.start(fake_stage.__name__, words, log, 2, warn, {"CUDA_VISIBLE_DEVICES": "6,7"})
        assert isinstance(process, ForkedProcess)
        forked.append(process)
        return process

    yield fork_stage
    for process in forked:
        kill(process)


def servers_of(process: psutil.Process) -> list[psutil.Process]:
    """The fork servers among a process's children."""
    return [child for child in process.children() if "millrace.forking.stage_server" in command_line(child)]


def command_line(process: psutil.Process) -> list[str]:
    """A process's command line. One that is ending, which is a zombie until it is waited for, has none."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def test_a_forked_stage_is_a_child_with_its_own_session_threads_gpus_and_name(
    make_server: Callable[[str], StageForkServer], fork: Fork
) -> None:
    process = fork(make_server(fake_stage.__name__), "facts")
    facts: dict[str, Any] = json.loads(process.stdout.readline())
    name = psutil.Process(process.pid).cmdline()
    process.stdin.close()
    assert process.wait() == 0
    assert facts == {
        "parent": os.getpid(), "session": process.pid, "group": process.pid, "threads": 1, "omp": "2", "cuda": False,
        "devices": "6,7",
        # In addition to the standard ones, only the listing's own descriptor.
        "argv": ["facts"], "descriptors": [0, 1, 2, 3],
    }  # fmt: skip
    assert name[1:] == ["-m", fake_stage.__name__, "facts"]


def test_only_forked_stages_are_adopted(make_server: Callable[[str], StageForkServer], fork: Fork) -> None:
    process = fork(make_server(fake_stage.__name__), "child", "drain")
    orphan = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert psutil.Process(orphan).ppid() != os.getpid()
    kill(process)
    wait_until(lambda: is_gone(orphan), "the child of the stage to be gone")


def test_a_killed_fork_server_is_restarted_and_its_stages_live_on(
    make_server: Callable[[str], StageForkServer], fork: Fork
) -> None:
    other_servers = set(servers_of(psutil.Process()))
    server = make_server(fake_stage.__name__)
    first = fork(server, "drain")
    first.stdout.readline()
    (fork_server,) = set(servers_of(psutil.Process())) - other_servers
    fork_server.kill()
    warnings: list[str] = []
    second = fork(server, "exit:3", warn=warnings.append)
    assert warnings == ["the fork server ended: SIGKILL; it is started again"]
    assert second.wait() == 3
    assert first.poll() is None
    first.terminate()
    assert first.wait() == 75


def test_a_fork_server_that_keeps_dying_is_given_up_with_the_end_of_its_log(
    make_server: Callable[[str], StageForkServer], fork: Fork
) -> None:
    with pytest.raises(StageDied) as died:
        fork(make_server("support.stages.no_such_module"), warn=str)
    sentence, *log = str(died.value).splitlines()
    assert sentence == "the fork server of the stages ended 3 times in a row: exit code 1"
    assert log[-1] == "ModuleNotFoundError: No module named 'support.stages.no_such_module'"


def test_a_stage_is_started_as_a_command_if_an_import_starts_a_thread(
    make_server: Callable[[str], StageForkServer],
) -> None:
    server, warnings = make_server(starts_a_thread.__name__), list[str]()
    for _ in range(2):
        with Path(os.devnull).open("ab") as log:
            process = server.start(fake_stage.__name__, ["exit:3"], log, 1, warnings.append)
        assert not isinstance(process, ForkedProcess)
        assert process.wait() == 3
        kill(process)
    reason = "is started without the fork server: importing its packages started 1 thread"
    assert warnings == [f"{fake_stage.__name__} {reason}"] * 2


@pytest.mark.parametrize("killed", ["controller", "fork server and controller"])
def test_a_stage_and_its_fork_server_end_with_their_controller(killed: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])}
    command = [sys.executable, "-m", forks_and_waits.__name__]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None
        try:
            stage = int(controller.stdout.readline())
            # A stage that was just forked has its fork server's name for a moment.
            (fork_server,) = [child for child in servers_of(psutil.Process(controller.pid)) if child.pid != stage]
            if "fork server" in killed:
                fork_server.kill()
        finally:
            controller.kill()
    wait_until(lambda: is_gone(stage) and is_gone(fork_server.pid), "the stage and the fork server to be gone")


def test_a_question_is_answered_by_a_forked_process() -> None:
    STAGES.warm_up(["json"])
    try:
        # The standard library's json.tool writes its input.
        assert ask("json.tool", {"a": [1, "ü"]}, "nothing") == {"a": [1, "ü"]}
        answers = [ask_in_background("json.tool", number, "nothing") for number in range(3)]
        assert [answer.result() for answer in answers] == [0, 1, 2]
        with pytest.raises(StageDied):
            ask("no_such_module", None, "the moon")
    finally:
        STAGES.close()
