"""Reading in a thread while the trainer computes."""

import threading
import time

import pytest

from millrace.rollouts.loader import RolloutLoader
from millrace.stages.read_ahead import ReadAhead
from storage.errors import StreamCorrupt


class CountingLoader(RolloutLoader):
    """Counts its refills; from `fails_at` on they raise."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.refills = 0
        self.fails_at = fails_at
        self.threads: set[threading.Thread] = set()

    def refill(self) -> None:
        self.threads.add(threading.current_thread())
        self.refills += 1
        if self.refills == self.fails_at:
            raise StreamCorrupt("streams/trajectories/0", "record 3 is damaged", 3)


def wait_for_refills(loader: CountingLoader, number: int) -> None:
    while loader.refills < number:
        time.sleep(0.01)


def test_a_thread_refills_the_loader_as_long_as_the_block_runs() -> None:
    loader = CountingLoader()
    with ReadAhead(loader):
        wait_for_refills(loader, 2)
    assert threading.current_thread() not in loader.threads
    assert not any(thread.is_alive() for thread in loader.threads)


def test_an_error_of_the_thread_is_raised_at_the_end_of_the_block() -> None:
    loader = CountingLoader(fails_at=2)
    ended = False
    with pytest.raises(StreamCorrupt, match="record 3 is damaged"), ReadAhead(loader):
        wait_for_refills(loader, 2)
        ended = True
    assert ended
    assert loader.refills == 2


def test_an_error_of_the_block_is_not_replaced() -> None:
    loader = CountingLoader(fails_at=1)
    with pytest.raises(ZeroDivisionError), ReadAhead(loader):
        wait_for_refills(loader, 1)
        _ = 1 // 0
