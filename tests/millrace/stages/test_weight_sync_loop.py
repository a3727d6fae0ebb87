"""The loop of sync_weights, over fakes: a trainer, two routes, generators, and a stage that may be started again."""

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.stores.dict_store import DictStore

from configs.schema import RunConfig
from millrace.errors import WeightsCorrupt
from millrace.runs.history import TIME_METRICS
from millrace.runtime.arguments import StageArguments
from millrace.runtime.messages import EventKind
from millrace.runtime.stage import Stage
from millrace.stages.sync_weights import WeightSyncLoop
from millrace.weights.base import HandoverReceiver, Manifest, Weights, WeightsId, WeightsSender
from millrace.weights.fingerprint import fingerprint
from storage import layout
from storage.errors import Fenced
from storage.progress import read_status, write_progress
from storage.schema import METRIC
from storage.streams.stream import StreamReader

START = 1000.0
DEADLINE = 30.0


@dataclass
class Handover(HandoverReceiver):
    """The version that a trainer handed over last."""

    offered: Weights | None = None
    damaged: bool = False
    asked: int = 0

    def verify(self, weights: Weights) -> None:
        if self.damaged:
            raise WeightsCorrupt("version 12 is damaged")

    def request_resend(self) -> None:
        self.asked += 1
        self.offered = None

    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        return self.offered if self.offered is not None and self.offered.id.newer_than(newer_than) else None

    def close(self) -> None:
        pass


@dataclass
class Route(WeightsSender):
    """Remembers what was published; `dies_at` is the version, from 1, that it does not survive."""

    published: list[WeightsId] = field(default_factory=list)
    dies_at: int = 0

    def publish(self, weights: Weights) -> None:
        if len(self.published) + 1 == self.dies_at:
            self.dies_at = 0
            raise Died
        self.published.append(weights.id)

    def close(self) -> None:
        pass


class Died(Exception):
    """Stands for the end of the process."""


class HeardStage(Stage):
    """A stage that records its milestones and events."""

    heard: list[str]
    told: list[tuple[EventKind, dict[str, Any]]]

    def log(self, line: str) -> None:
        self.heard.append(line)

    def emit_event(self, kind: EventKind, **payload: Any) -> None:
        self.told.append((kind, payload))


class Clock:
    """Unix seconds that pass when a test says so."""

    now = START

    def __call__(self) -> float:
        return self.now


class World:
    """A trainer, generators and a sync_weights stage that may be restarted, without a process among them."""

    stages: ClassVar[list[HeardStage]] = []
    """The stages of all worlds of a test."""

    def __init__(self, num_generators: int = 2, transport: str = "shm") -> None:
        self.store = DictStore()
        self.clock = Clock()
        self.handover = Handover()
        self.primary, self.fallback = Route(), Route()
        self.heard: list[str] = []
        self.told: list[tuple[EventKind, dict[str, Any]]] = []
        self.opened_the_store = 0
        self.transport = transport
        self.config = RunConfig.model_validate(
            {
                "training": {"max_steps": 1},
                "generation": {"replicas": num_generators},
                "weights": {"transport": transport, "deadline_seconds": DEADLINE},
            }
        )
        self.start()

    def start(self) -> None:
        """The stage, for the first time or again."""
        arguments = StageArguments(run_url=self.store.url, attempt=0, replica=0, handover=Path("/nowhere"))
        self.stage = HeardStage(name="sync_weights", arguments=arguments, config=self.config, store=self.store)
        self.stage.heard, self.stage.told = self.heard, self.told
        self.stages.append(self.stage)
        open_store = None if self.transport == "store" else self._open_store
        self.loop = WeightSyncLoop(self.stage, self.handover, self.primary, open_store, clock=self.clock)

    def _open_store(self) -> WeightsSender:
        self.opened_the_store += 1
        return self.fallback

    def hand_over(self, policy_version: int, incarnation: int = 0) -> WeightsId:
        tensors = {"embed": torch.full((4,), float(policy_version))}
        weights_id = WeightsId(incarnation=incarnation, policy_version=policy_version, t_offered=self.clock.now)
        manifest = Manifest(id=weights_id, fingerprint=fingerprint(tensors))
        self.handover.offered, self.handover.damaged = Weights(manifest=manifest, tensors=tensors), False
        return weights_id

    def acknowledge(self, generator: int, weights_id: WeightsId, **values: Any) -> None:
        status = {
            "incarnation": weights_id.incarnation,
            "policy_version": weights_id.policy_version,
            "weights_digest": fingerprint({"embed": torch.full((4,), float(weights_id.policy_version))}).digest,
            "t_updated": self.clock.now,
        }
        write_progress(self.store, "generate", generator, status | values)

    def run_once(self, after_seconds: float = 0.0) -> bool:
        self.clock.now += after_seconds
        return self.loop.run_once()

    def status(self) -> dict[str, Any]:
        """The stage's status record."""
        self.stage.update_status(now=True)
        return read_status(self.store, "sync_weights", 0)

    def measured(self) -> dict[int, dict[str, float]]:
        """Metrics of pushes by policy version; ends the stage."""
        self.stage.close()
        rows: dict[int, dict[str, float]] = defaultdict(dict)
        reader = StreamReader(self.store, layout.metrics("sync_weights", 0), METRIC)
        while (part := reader.next()) is not None:
            for row in part.table.to_pylist():
                if not row["name"].startswith(TIME_METRICS):
                    rows[row["policy_version"]][row["name"]] = row["value"]
        return rows


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """No stage outlives its test: its measurements have a thread, not to be at work when the interpreter ends."""
    yield
    for stage in World.stages:
        with suppress(Fenced):
            stage.close()
    World.stages.clear()


def test_a_push_is_a_row_of_metrics(world: World) -> None:
    pushed = world.hand_over(3)
    assert world.run_once()
    world.acknowledge(0, pushed, pause_seconds=0.5)
    world.clock.now += 2
    world.acknowledge(1, pushed, pause_seconds=0.25)
    assert not world.run_once()
    (row,) = world.measured().values()
    assert row.pop("push_hash_seconds") >= 0
    assert row.pop("push_offer_seconds") >= 0
    assert row == {"push_bytes": 32, "push_seconds": 2, "generator_pause_seconds_max": 0.5, "fallbacks": 0}


def test_a_late_generator_is_served_by_the_store_until_it_is_back(world: World) -> None:
    first = world.hand_over(12)
    world.run_once()
    world.acknowledge(0, first)
    world.run_once(after_seconds=31)
    assert (world.status()["late"], world.status()["fallbacks"]) == ([1], 1)
    assert world.fallback.published == [first]
    second = world.hand_over(13)
    world.run_once(after_seconds=9)
    world.acknowledge(0, second)
    world.acknowledge(1, first, weights_route="store")
    world.run_once(after_seconds=1)
    assert (world.status()["late"], world.status()["fallbacks"]) == ([], 1)
    events = [(kind, payload) for kind, payload in world.told if kind != "version.published"]
    assert [(kind, payload["generator"]) for kind, payload in events] == [
        ("generator.lost", 1),
        ("generator.rejoined", 1),
    ]
    assert [payload["sentence"] for _, payload in events] == world.heard
    assert world.primary.published == [first, second]
    rows = world.measured()
    assert rows[12]["fallbacks"] == 1
    assert "push_seconds" not in rows[13]


def test_the_store_gets_the_newest_version_once_per_deadline(world: World) -> None:
    world.run_once()
    for step in range(1, 101):
        world.acknowledge(0, world.hand_over(step))
        world.run_once(after_seconds=1)
    # Version 1 is late after 31 s, when 30 versions have been pushed.
    for _ in range(20):
        world.run_once(after_seconds=10)
    stored = [weights_id.policy_version for weights_id in world.fallback.published]
    assert stored == [30, 60, 90, 100], "and nothing twice"
    assert world.opened_the_store == 1


def test_the_store_is_not_touched_while_no_generator_is_late(world: World) -> None:
    for step in range(50):
        pushed = world.hand_over(step)
        world.run_once(after_seconds=1)
        for generator in range(2):
            world.acknowledge(generator, pushed)
        world.run_once(after_seconds=1)
    assert world.opened_the_store == 0
    assert world.status()["fallbacks"] == 0


def test_a_damaged_version_is_requested_again_and_not_stored(world: World) -> None:
    first = world.hand_over(12)
    world.run_once()
    world.handover.damaged = True
    world.run_once(after_seconds=31)
    assert (world.handover.asked, world.fallback.published) == (1, [])
    assert world.heard[-1].startswith("version 12 is damaged: ")
    world.run_once(after_seconds=31)
    again = world.hand_over(12)
    world.run_once()
    assert world.primary.published == [first, again]
    for generator in range(2):
        world.acknowledge(generator, again)
    world.run_once(after_seconds=1)
    assert world.handover.asked == 1
    assert world.status()["late"] == []


def test_with_the_store_as_transport_a_late_generator_is_only_reported() -> None:
    world = World(num_generators=1, transport="store")
    world.hand_over(12)
    world.run_once()
    world.run_once(after_seconds=31)
    assert (world.status()["late"], world.status()["fallbacks"]) == ([0], 0)
    assert len(world.heard) == 1
    assert world.fallback.published == []


def test_a_restarted_generator_is_tracked_again(world: World) -> None:
    pushed = world.hand_over(12)
    world.run_once()
    for generator in range(2):
        world.acknowledge(generator, pushed)
    world.run_once(after_seconds=1)
    world.acknowledge(1, pushed, process="another", t_ready=START + 3)
    world.run_once(after_seconds=3)
    world.run_once(after_seconds=31)
    assert [payload["generator"] for kind, payload in world.told if kind == "generator.lost"] == [1]
    assert world.fallback.published == [pushed]


@pytest.mark.parametrize("dies_at", [1, 2, 3])
def test_a_stage_that_dies_during_a_push_repeats_it_after_its_restart(world: World, dies_at: int) -> None:
    world.primary.dies_at = dies_at
    deaths = 0
    for step in range(3):
        pushed = world.hand_over(step)
        try:
            world.run_once()
        except Died:
            deaths += 1
            world.start()
            world.run_once()
        for generator in range(2):
            world.acknowledge(generator, pushed)
        world.run_once()
    assert deaths == 1
    assert [offered.policy_version for offered in world.primary.published] == [0, 1, 2]


def test_a_restarted_stage_pushes_and_measures_an_unacknowledged_version(world: World) -> None:
    pushed = world.hand_over(7)
    world.run_once()
    world.start()
    world.run_once()
    assert world.primary.published == [pushed, pushed]
    for generator in range(2):
        world.acknowledge(generator, pushed)
    world.run_once(after_seconds=1)
    assert world.measured()[7]["push_seconds"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(n, marks=pytest.mark.extended) for n in range(5, 20))])
def test_no_older_version_is_ever_offered_after_a_newer_one(seed: int) -> None:
    chooser, world = random.Random(seed), World(num_generators=4)
    handed_over: list[WeightsId] = []
    incarnation = policy_version = restarts = 0
    for _ in range(300):
        event = chooser.random()
        if event < 0.4:
            policy_version += 1
            handed_over.append(world.hand_over(policy_version, incarnation))
        elif event < 0.45:
            # The trainer is killed and goes back to a checkpoint.
            incarnation, policy_version = incarnation + 1, max(0, policy_version - 5)
        elif event < 0.5:
            restarts += 1
            world.start()
        elif event < 0.6 and handed_over:
            world.acknowledge(chooser.randrange(2), chooser.choice(handed_over[-3:]))
        world.run_once(after_seconds=chooser.random() * 10)
    for route in (world.primary, world.fallback):
        order = [(offered.incarnation, offered.policy_version) for offered in route.published]
        assert order == sorted(order), f"seed {seed}"
    # The witnesses: generators 2 and 3, which never answer, had the store opened, and there was something to get wrong.
    assert len(world.fallback.published) > 3, f"seed {seed}"
    assert restarts > 3, f"seed {seed}"
    assert incarnation > 3, f"seed {seed}"


def test_fast_versions_send_one_event_in_ten_seconds() -> None:
    world = World(num_generators=1)
    for version in range(30):
        offered = world.hand_over(version)
        world.run_once()
        world.clock.now += 0.5
        world.acknowledge(0, offered)
        world.run_once(0.5)
    published = [payload for kind, payload in world.told if kind == "version.published"]
    assert [payload["policy_version"] for payload in published] == [0, 10, 20]
    assert {payload["push_seconds"] for payload in published} == {0.5}
