"""Signs of life between a controller and the hosts of its stages."""

import time
from collections.abc import Callable

from millrace.hosts import Beacon, Watch
from storage.errors import StoreUnreachable
from storage.memory import MemoryStore
from storage.progress import read_life
from storage.store import BytesLike, Store


def beacon(store: Store, of: str, draining: Callable[[], bool] = lambda: False) -> Beacon:
    return Beacon(store, "place-train", 0, of=of, doing="on host-3", draining=draining)


def test_a_beacon_says_whose_it_is_where_and_whether_it_drains_and_at_last_that_it_has_stopped(
    memory_store: Store,
) -> None:
    draining = False
    with beacon(memory_store, "run-1", lambda: draining) as us:
        assert read_life(memory_store, "place-train", 0) | {"t": 0} == {
            "of": "run-1", "doing": "on host-3", "draining": False, "beat": 1, "t": 0,
        }  # fmt: skip
        draining = True
        us.say(ended=True, sentence="what went wrong")
        life = read_life(memory_store, "place-train", 0)
        assert (life["draining"], life["ended"], life["sentence"], life["beat"]) == (True, True, "what went wrong", 2)
    assert read_life(memory_store, "place-train", 0)["doing"] == "stopped"


def test_a_watch_counts_silence_from_the_last_beat_that_was_new_to_it(memory_store: Store) -> None:
    watch = Watch(memory_store, "place-train", 0)
    with beacon(memory_store, "run-1") as us:
        time.sleep(0.3)
        assert watch.look() < 0.3
        assert watch.life["of"] == "run-1"
        time.sleep(0.3)
        assert watch.look() >= 0.3
        us.say()
        assert watch.look() < 0.3


def test_a_successor_that_counts_from_the_beginning_is_new(memory_store: Store) -> None:
    watch = Watch(memory_store, "place-train", 0)
    for of in ("run-1", "run-2"):
        beacon(memory_store, of).say()
        time.sleep(0.3)
        assert watch.look() < 0.3
        assert watch.life["of"] == of


def test_whoever_never_spoke_has_been_silent_since_the_watch_began(memory_store: Store) -> None:
    watch = Watch(memory_store, "place-train", 0)
    time.sleep(0.3)
    assert watch.look() >= 0.3
    assert watch.life == {}


class Unreachable(MemoryStore):
    """Out of reach when told so."""

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


def test_a_store_out_of_reach_is_silence_to_a_watch_and_no_fault_of_a_beacon() -> None:
    store = Unreachable("test-hosts-out-of-reach")
    watch = Watch(store, "place-train", 0)
    with beacon(store, "run-1"):
        watch.look()
        store.away = True
        time.sleep(0.3)
        assert watch.look() >= 0.3
        assert watch.life["of"] == "run-1"
