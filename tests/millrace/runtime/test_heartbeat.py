"""Heartbeats between a controller and the hosts of its stages."""

import time
from collections.abc import Callable

from support.stores.memory import unused_name

from millrace.runtime.heartbeat import HeartbeatMonitor, HeartbeatPublisher
from storage.errors import StoreUnreachable
from storage.progress import read_status
from storage.stores.base import BytesLike, Store
from storage.stores.memory import MemoryStore


def publisher(store: Store, owner_id: str, draining: Callable[[], bool] = lambda: False) -> HeartbeatPublisher:
    return HeartbeatPublisher(store, "place-train", 0, owner_id=owner_id, doing="on host-3", draining=draining)


def test_a_publisher_says_whether_it_drains_and_that_it_has_stopped(memory_store: Store) -> None:
    draining = False
    with publisher(memory_store, "run-1", lambda: draining) as us:
        status = read_status(memory_store, "place-train", 0)
        assert (status["of"], status["doing"], status["draining"], status["beat"]) == ("run-1", "on host-3", False, 1)
        draining = True
        us.publish(ended=True)
        status = read_status(memory_store, "place-train", 0)
        assert (status["draining"], status["ended"], status["beat"]) == (True, True, 2)
    assert read_status(memory_store, "place-train", 0)["doing"] == "stopped"


def test_a_monitor_counts_silence_from_the_last_new_heartbeat(memory_store: Store) -> None:
    monitor = HeartbeatMonitor(memory_store, "place-train", 0)
    with publisher(memory_store, "run-1") as us:
        time.sleep(0.3)
        assert monitor.look() < 0.3
        assert monitor.owner_id == "run-1"
        time.sleep(0.3)
        assert monitor.look() >= 0.3
        us.publish()
        assert monitor.look() < 0.3


def test_a_successor_that_counts_from_the_beginning_is_new(memory_store: Store) -> None:
    monitor = HeartbeatMonitor(memory_store, "place-train", 0)
    for owner_id in ("run-1", "run-2"):
        publisher(memory_store, owner_id).publish()
        time.sleep(0.3)
        assert monitor.look() < 0.3
        assert monitor.owner_id == owner_id


class Unreachable(MemoryStore):
    """A store that can be out of reach."""

    away = False

    def get(self, path: str) -> memoryview:
        self._check()
        return super().get(path)

    def put(self, path: str, data: BytesLike) -> None:
        self._check()
        super().put(path, data)

    def _check(self) -> None:
        if self.away:
            raise StoreUnreachable("the link is cut")


def test_an_unreachable_store_is_silence() -> None:
    store = Unreachable(unused_name())
    monitor = HeartbeatMonitor(store, "place-train", 0)
    with publisher(store, "run-1"):
        monitor.look()
        store.away = True
        time.sleep(0.3)
        assert monitor.look() >= 0.3
        assert monitor.owner_id == "run-1"
