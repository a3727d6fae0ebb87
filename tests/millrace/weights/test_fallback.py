"""What does not come by the transport comes through the store, and damage is raised once."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from millrace.errors import WeightsCorrupt
from millrace.weights.base import Manifest, Weights, WeightsId, WeightsReceiver
from millrace.weights.fallback import FallbackReceiver


@dataclass
class Route(WeightsReceiver):
    """A transport whose newest version a test sets, whole or damaged."""

    newest: WeightsId | None = None
    damaged: bool = False
    asked: int = 0
    closed: bool = False
    handed_out: list[WeightsId] = field(default_factory=list)

    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        self.asked += 1
        if self.newest is None or not self.newest.newer_than(newer_than):
            return None
        if self.damaged:
            raise WeightsCorrupt(f"weights of version {self.newest.policy_version}: embed is damaged")
        self.handed_out.append(self.newest)
        return Weights(manifest=Manifest(id=self.newest), tensors={"embed": torch.zeros(1)})

    def close(self) -> None:
        self.closed = True


class Clock:
    """Monotonic seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def version(policy_version: int, incarnation: int = 0) -> WeightsId:
    return WeightsId(incarnation=incarnation, policy_version=policy_version, t_offered=0.0)


@dataclass
class Routes:
    primary: Route = field(default_factory=Route)
    store: Route = field(default_factory=Route)
    clock: Clock = field(default_factory=Clock)
    reader: FallbackReceiver = field(init=False)

    def __post_init__(self) -> None:
        self.reader = FallbackReceiver(self.primary, self.store, route="shm", look_seconds=1.0, clock=self.clock)

    def poll(self, newer_than: WeightsId | None = None, after_seconds: float = 0.0) -> WeightsId | None:
        self.clock.now += after_seconds
        weights = self.reader.poll(newer_than)
        return None if weights is None else weights.id


@pytest.fixture
def routes() -> Routes:
    return Routes()


def test_what_the_transport_has_is_taken_from_it_and_the_store_is_left_alone(routes: Routes) -> None:
    routes.primary.newest = routes.store.newest = version(3)
    assert routes.poll(after_seconds=9) == version(3)
    assert routes.reader.last_route == "shm"
    assert routes.store.asked == 0


def test_what_only_the_store_has_comes_from_there_and_is_named_so(routes: Routes) -> None:
    routes.store.newest = version(3)
    assert routes.poll(after_seconds=1) == version(3)
    assert routes.reader.last_route == "store"
    routes.primary.newest = version(4)
    assert routes.poll(version(3)) == version(4)
    assert routes.reader.last_route == "shm"


def test_after_a_start_it_waits_for_the_transport_before_it_looks_at_the_store(routes: Routes) -> None:
    routes.store.newest = version(3)
    assert routes.poll() is None
    routes.primary.newest = version(0, incarnation=1)
    assert routes.poll() == version(0, incarnation=1)
    assert routes.poll(version(0, incarnation=1), after_seconds=9) is None
    assert routes.store.asked == 1


def test_the_store_is_looked_at_once_a_second_and_the_transport_each_time(routes: Routes) -> None:
    for _ in range(100):
        assert routes.poll(after_seconds=0.0625) is None
    assert routes.primary.asked == 100
    assert routes.store.asked == 6


def test_a_damaged_version_is_replaced_by_what_the_store_has(routes: Routes) -> None:
    routes.primary.newest, routes.primary.damaged = version(4), True
    routes.store.newest = version(4)
    assert routes.poll(version(3), after_seconds=1) == version(4)
    assert routes.reader.last_route == "store"


def test_a_damaged_version_is_raised_once_and_not_looked_at_all_the_time(routes: Routes) -> None:
    routes.primary.newest, routes.primary.damaged = version(4), True
    with pytest.raises(WeightsCorrupt, match="version 4"):
        routes.poll(version(3), after_seconds=1)
    for _ in range(100):
        assert routes.poll(version(3), after_seconds=0.0625) is None
    assert routes.primary.asked == 7
    routes.primary.newest = version(5)
    with pytest.raises(WeightsCorrupt, match="version 5"):
        routes.poll(version(3), after_seconds=1)
    routes.primary.newest, routes.primary.damaged = version(6), False
    assert routes.poll(version(3), after_seconds=1) == version(6)
    assert routes.reader.last_route == "shm"


def test_damage_in_the_store_does_not_hide_what_the_transport_has(routes: Routes) -> None:
    routes.store.newest, routes.store.damaged = version(4), True
    with pytest.raises(WeightsCorrupt, match="version 4"):
        routes.poll(version(3), after_seconds=1)
    routes.primary.newest = version(5)
    assert routes.poll(version(3), after_seconds=1) == version(5)


def test_when_both_are_damaged_both_are_raised(routes: Routes) -> None:
    routes.primary.newest, routes.primary.damaged = version(5), True
    routes.store.newest, routes.store.damaged = version(4), True
    for expected in ("version 5", "version 4"):
        with pytest.raises(WeightsCorrupt, match=expected):
            routes.poll(version(3), after_seconds=1)
    assert routes.poll(version(3), after_seconds=1) is None


def test_without_a_store_to_fall_back_to_there_is_the_transport_alone() -> None:
    store = Route(newest=version(3))
    reader = FallbackReceiver(store, None, route="store")
    taken = reader.poll(None)
    assert taken is not None
    assert taken.id == version(3)
    assert reader.last_route == "store"
    reader.close()
    assert store.closed


def test_both_routes_are_closed(routes: Routes) -> None:
    routes.reader.close()
    assert (routes.primary.closed, routes.store.closed) == (True, True)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_either_route_does_no_version_is_taken_twice_or_after_a_newer_one(seed: int) -> None:
    chooser, routes = random.Random(seed), Routes()
    taken: WeightsId | None = None
    taken_by, damage = set(), 0
    for step in range(400):
        route = chooser.choice([routes.primary, routes.store])
        route.newest = version(step // 4, incarnation=step // 150)
        route.damaged = chooser.random() < 0.3
        try:
            found = routes.poll(taken, after_seconds=chooser.random())
        except WeightsCorrupt:
            damage += 1
            continue
        if found is not None:
            assert found.newer_than(taken), f"seed {seed}"
            taken = found
            taken_by.add(routes.reader.last_route)
    # The witnesses: both routes were taken, and damage was met.
    assert taken_by == {"shm", "store"}, f"seed {seed}"
    assert damage > 0, f"seed {seed}"
