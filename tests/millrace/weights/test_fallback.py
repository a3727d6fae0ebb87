"""The fallback: versions that the transport does not deliver come from the store; damage is raised once."""

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
    polls: int = 0
    closed: bool = False
    handed_out: list[WeightsId] = field(default_factory=list)

    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        self.polls += 1
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


def test_a_version_of_the_transport_is_taken_without_polling_the_store(routes: Routes) -> None:
    routes.primary.newest = routes.store.newest = version(3)
    assert routes.poll(after_seconds=9) == version(3)
    assert routes.reader.last_route == "shm"
    assert routes.store.polls == 0


def test_a_missing_or_damaged_version_comes_from_the_store(routes: Routes) -> None:
    routes.store.newest = version(3)
    assert routes.poll(after_seconds=1) == version(3)
    assert routes.reader.last_route == "store"
    routes.primary.newest = version(4)
    assert routes.poll(version(3)) == version(4)
    assert routes.reader.last_route == "shm"
    routes.primary.newest = routes.store.newest = version(5)
    routes.primary.damaged = True
    assert routes.poll(version(4), after_seconds=1) == version(5)
    assert routes.reader.last_route == "store"
    routes.reader.close()
    assert (routes.primary.closed, routes.store.closed) == (True, True)


def test_after_a_start_the_transport_is_polled_before_the_store(routes: Routes) -> None:
    routes.store.newest = version(3)
    assert routes.poll() is None
    routes.primary.newest = version(0, incarnation=1)
    assert routes.poll() == version(0, incarnation=1)
    assert routes.poll(version(0, incarnation=1), after_seconds=9) is None
    assert routes.store.polls == 1


def test_the_store_is_polled_once_a_second(routes: Routes) -> None:
    for _ in range(100):
        assert routes.poll(after_seconds=0.0625) is None
    assert routes.primary.polls == 100
    assert routes.store.polls == 6


def test_a_damaged_version_is_raised_once(routes: Routes) -> None:
    routes.primary.newest, routes.primary.damaged = version(4), True
    with pytest.raises(WeightsCorrupt):
        routes.poll(version(3), after_seconds=1)
    for _ in range(100):
        assert routes.poll(version(3), after_seconds=0.0625) is None
    assert routes.primary.polls == 7
    routes.primary.newest = version(5)
    with pytest.raises(WeightsCorrupt):
        routes.poll(version(3), after_seconds=1)
    routes.primary.newest, routes.primary.damaged = version(6), False
    assert routes.poll(version(3), after_seconds=1) == version(6)
    assert routes.reader.last_route == "shm"


def test_damage_in_the_store_does_not_hide_the_transports_version(routes: Routes) -> None:
    routes.store.newest, routes.store.damaged = version(4), True
    with pytest.raises(WeightsCorrupt):
        routes.poll(version(3), after_seconds=1)
    routes.primary.newest = version(5)
    assert routes.poll(version(3), after_seconds=1) == version(5)


def test_when_both_are_damaged_both_are_raised(routes: Routes) -> None:
    routes.primary.newest, routes.primary.damaged = version(5), True
    routes.store.newest, routes.store.damaged = version(4), True
    for _ in range(2):
        with pytest.raises(WeightsCorrupt):
            routes.poll(version(3), after_seconds=1)
    assert routes.poll(version(3), after_seconds=1) is None


def test_without_a_fallback_the_transport_is_used_alone() -> None:
    store = Route(newest=version(3))
    reader = FallbackReceiver(store, None, route="store")
    taken = reader.poll(None)
    assert taken is not None
    assert taken.id == version(3)
    assert reader.last_route == "store"
    reader.close()
    assert store.closed


@pytest.mark.parametrize("seed", range(20))
def test_versions_are_taken_once_and_in_order_from_any_routes(seed: int) -> None:
    chooser, routes = random.Random(seed), Routes()
    taken: WeightsId | None = None
    taken_by, damage = set(), 0
    for step in range(400):
        route = chooser.choice([routes.primary, routes.store])
        route.newest = version(step // 4, incarnation=step // 150)
        route.damaged = chooser.random() < 0.3
        try:
            newest = routes.poll(taken, after_seconds=chooser.random())
        except WeightsCorrupt:
            damage += 1
            continue
        if newest is not None:
            assert newest.newer_than(taken), f"seed {seed}"
            taken = newest
            taken_by.add(routes.reader.last_route)
    # The witnesses: both routes were taken, and damage was met.
    assert taken_by == {"shm", "store"}, f"seed {seed}"
    assert damage > 0, f"seed {seed}"
