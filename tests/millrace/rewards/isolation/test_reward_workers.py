"""What the pool knows of its workers: spare ones, their processor time, and whether they have answered."""

import os
import socket
import time
from collections.abc import Iterator

import psutil
import pytest
from support.campaigns.campaigns import wait_until

from millrace.rewards.isolation.fork_server import RewardForkServer, RewardWorker
from millrace.rewards.isolation.sandbox import Limits

RECIPE = {"exact_match": {"answer_pattern": "([0-9]+)"}}


@pytest.fixture
def watched() -> Iterator[tuple[RewardWorker, socket.socket]]:
    """This process as a worker, and the end of the socket on which it would answer."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        worker = RewardWorker(os.getpid(), ours)
        worker.give(0, b"", time.monotonic())
        yield worker, theirs


def compute(seconds: float) -> None:
    """Use so much processor time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_spare_workers_are_forked_ahead_and_taken_before_any_other() -> None:
    before = set(psutil.Process().children())
    server = RewardForkServer(RECIPE, Limits())
    try:
        [process] = set(psutil.Process().children()) - before
        server.prefork(3)
        wait_until(lambda: len(process.children()) == 3, "three workers")
        spare = {child.pid for child in process.children()}
        server.prefork(3)
        assert {server.take().pid for _ in range(3)} == spare
        assert server.take().pid not in spare
    finally:
        server.close()


def test_the_processor_time_of_a_task_is_counted_from_its_beginning(
    watched: tuple[RewardWorker, socket.socket],
) -> None:
    worker, _ = watched
    compute(0.05)
    assert worker.busy_seconds() >= 0.05
    assert worker.lap_seconds() >= 0.05
    compute(0.01)
    assert 0.01 <= worker.busy_seconds() < 0.05


def test_an_answer_that_has_arrived_is_seen_and_stays(watched: tuple[RewardWorker, socket.socket]) -> None:
    worker, theirs = watched
    assert not worker.has_answered()
    theirs.sendall(b"ans")
    assert not worker.has_answered(), "whoever sends bits of a line is not done"
    theirs.sendall(b"wer\n")
    assert worker.has_answered()
    assert worker.receive(100) == [b"answer"]
    assert not worker.has_answered()
    theirs.close()
    assert worker.has_answered(), "that it has ended"
