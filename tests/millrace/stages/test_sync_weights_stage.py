"""The sync_weights stage as a process between a trainer and generators: killed, or with a generator out of reach."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stages.failpoints import Failpoints
from support.weights.direct import ShardedTrainer
from support.weights.direct_policies import layout_of

from configs.schema import RunConfig
from millrace.errors import DRAINED, WeightsCorrupt
from millrace.runs.record import create_run
from millrace.runtime.arguments import StageArguments
from millrace.runtime.messages import Event, Heartbeat, read_line
from millrace.weights.base import HandoverSender, Manifest, Weights, WeightsId, WeightsReceiver, WeightsSender
from millrace.weights.factory import generator_end, trainer_end
from millrace.weights.fallback import FallbackReceiver
from millrace.weights.store import StoreReceiver
from storage import layout
from storage.progress import read_status, write_progress
from storage.schema import METRIC
from storage.stores.local import LocalStore
from storage.streams.stream import StreamReader

TENSORS = {"embed": torch.zeros(1000, 7), "norm": torch.zeros(5, dtype=torch.bfloat16)}


class Unreached(WeightsReceiver):
    """A generator's end of a transport that nothing comes by."""

    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        return None

    def close(self) -> None:
        pass


class Generator:
    """Takes what comes, and acknowledges it."""

    def __init__(self, store: LocalStore, number: int, receiver: FallbackReceiver) -> None:
        self.store = store
        self.number = number
        self.receiver = receiver
        self.held: WeightsId | None = None

    def look(self) -> None:
        weights = self.receiver.poll(self.held)
        if weights is None:
            return
        assert weights.id.newer_than(self.held)
        for tensor in weights.tensors.values():
            assert torch.equal(tensor, torch.full_like(tensor, weights.id.policy_version)), self.number
        self.held = weights.id
        status: dict[str, Any] = {
            "incarnation": weights.id.incarnation,
            "policy_version": weights.id.policy_version,
            "weights_digest": weights.fingerprint.digest,
            "weights_route": self.receiver.last_route,
            "pause_seconds": 0.0,
            "t_updated": time.time(),
        }
        write_progress(self.store, "generate", self.number, status)


class Campaign:
    """A run whose sync_weights is a separate process, restarted whenever it is killed."""

    def __init__(self, folder: Path, transport: str, deadline_seconds: float, *failpoints: str) -> None:
        self.config = RunConfig.model_validate(
            {
                "training": {"max_steps": 1},
                "generation": {"replicas": 2},
                "weights": {"transport": transport, "deadline_seconds": deadline_seconds},
                "placement": {"train": {"network": "127.0.0.0/8"}},
            }
        )
        self.store = LocalStore(folder / "run", fsync=False)
        create_run(self.store, "run", self.config.model_dump(mode="json"))
        self.handover = folder / "shared"
        self.handover.mkdir()
        self.failpoints = Failpoints(folder / "fired", *failpoints)
        self.output = (folder / "output").open("w+")
        self.deaths = 0
        self.process = self._start()
        self.trainer: WeightsSender
        if transport == "direct":
            layout = layout_of(TENSORS, 2)
            self.trainer = ShardedTrainer(self._address, layout, deadline_seconds=deadline_seconds)
        else:
            self.trainer = trainer_end(self.handover, TENSORS, num_generators=2)
        self.generators = [Generator(self.store, number, self.generator_end(number)) for number in range(2)]

    def _address(self) -> str | None:
        address: str | None = self.status().get("address")
        return address

    def generator_end(self, number: int) -> FallbackReceiver:
        return generator_end(self.config.weights, self.store, self.handover, number)

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = StageArguments(run_url=self.store.url, attempt=0, replica=0, handover=self.handover)
        return subprocess.Popen(
            [sys.executable, "-m", "millrace.stages.sync_weights", *arguments.as_argv()],
            stdin=subprocess.PIPE,
            stdout=self.output,
            env={**self.failpoints.environment(), "OMP_NUM_THREADS": "1"},
        )

    def offer(self, policy_version: int) -> WeightsId:
        weights_id = WeightsId(incarnation=0, policy_version=policy_version, t_offered=time.time())
        tensors = {name: torch.full_like(tensor, policy_version) for name, tensor in TENSORS.items()}
        self.trainer.publish(Weights(manifest=Manifest(id=weights_id), tensors=tensors))
        return weights_id

    def go_on_until(self, condition: Callable[[], bool], *, answering: bool = True) -> None:
        """Starts the stage again whenever it is killed; the generators look for weights if they are `answering`."""
        while not condition():
            if self.process.poll() is not None:
                assert self.process.returncode == -signal.SIGKILL
                self.deaths += 1
                self.process = self._start()
            for generator in self.generators if answering else ():
                generator.look()
            time.sleep(0.005)

    def all_hold(self, weights_id: WeightsId) -> bool:
        return all(generator.held == weights_id for generator in self.generators)

    def status(self) -> dict[str, Any]:
        return read_status(self.store, "sync_weights", 0)

    def drain(self) -> None:
        self.process.terminate()
        assert self.process.wait() == DRAINED

    def milestones(self) -> list[str]:
        return [line for line in self._lines() if isinstance(line, str)]

    def told(self) -> list[Event]:
        return [line for line in self._lines() if isinstance(line, Event)]

    def _lines(self) -> list[Heartbeat | Event | str]:
        self.output.seek(0)
        return [read_line(line) for line in self.output.read().splitlines()]

    def measured(self, name: str) -> list[int]:
        """Versions with a measurement of this name."""
        reader, versions = StreamReader(self.store, layout.metrics("sync_weights", 0), METRIC), []
        while (part := reader.next()) is not None:
            versions += [row["policy_version"] for row in part.table.to_pylist() if row["name"] == name]
        return versions

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for generator in self.generators:
            generator.receiver.close()
        self.trainer.close()
        self.output.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Campaign]]:
    started: list[Campaign] = []

    def start_one(transport: str, deadline_seconds: float, *failpoints: str) -> Campaign:
        started.append(Campaign(tmp_path, transport, deadline_seconds, *failpoints))
        return started[-1]

    yield start_one
    for campaign in started:
        campaign.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "place"),
    [("shm", "before_push"), ("direct", "after_push"), ("store", "awaiting_acknowledgement")],
)
def test_generators_get_every_version_through_a_stage_killed_during_a_push(
    start: Callable[..., Campaign], transport: str, place: str
) -> None:
    campaign = start(transport, 5.0, f"sync_weights-0 sync_weights.{place} 2 kill")
    for step in range(5):
        offered = campaign.offer(step)
        if step == 1 and place == "awaiting_acknowledgement":
            # Generators that answer before the stage has looked leave it nothing to await.
            campaign.go_on_until(lambda: campaign.deaths == 1, answering=False)
        campaign.go_on_until(lambda: campaign.all_hold(offered))  # noqa: B023 — called before the next one
    assert campaign.status()["transport"] == transport
    assert (campaign.status()["address"] is not None) == (transport == "direct")
    campaign.go_on_until(lambda: campaign.status().get("policy_version") == 4)
    campaign.drain()
    # The witness.
    assert (campaign.failpoints.missed(), campaign.deaths) == ([], 1)
    assert set(campaign.measured("push_bytes")) >= {2, 3, 4}
    assert not any("ALARM" in line for line in campaign.milestones())


@pytest.mark.slow
def test_a_version_damaged_after_its_push_is_resent_after_the_deadline(start: Callable[..., Campaign]) -> None:
    campaign = start("shm", 1.0)
    offered = campaign.offer(1)
    # No generator looks yet.
    while campaign.status().get("policy_version") != 1:
        time.sleep(0.005)
    path = campaign.handover / "handover"
    content = torch.full_like(next(iter(TENSORS.values())), 1).numpy().tobytes()
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(content))
        file.write(bytes([content[0] ^ 1]))
    for generator in campaign.generators:
        with pytest.raises(WeightsCorrupt):
            generator.look()
    assert isinstance(campaign.trainer, HandoverSender)
    campaign.go_on_until(campaign.trainer.resend_requested)
    assert campaign.offer(1).policy_version == offered.policy_version
    campaign.go_on_until(lambda: all(generator.held is not None for generator in campaign.generators))
    campaign.drain()
    assert any("the trainer is asked to resend them" in line for line in campaign.milestones())
    assert not any("ALARM" in line for line in campaign.milestones())


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "direct"])
def test_a_generator_that_the_transport_does_not_reach_uses_the_store(
    start: Callable[..., Campaign], transport: str, tmp_path: Path
) -> None:
    campaign = start(transport, 1.5)
    campaign.generators[1].receiver.close()
    stored = StoreReceiver(campaign.store, tmp_path / "shared" / "stored")
    campaign.generators[1].receiver = FallbackReceiver(Unreached(), stored, route=transport, look_seconds=0.1)
    for step in range(2):
        offered = campaign.offer(step)
        campaign.go_on_until(lambda: campaign.all_hold(offered))  # noqa: B023 — called before the next one
    campaign.go_on_until(lambda: sum("generator 1 is back" in line for line in campaign.milestones()) == 2)
    assert campaign.status()["late"] == []
    assert campaign.status()["fallbacks"] >= 2
    campaign.drain()
    assert [generator.receiver.last_route for generator in campaign.generators] == [transport, "store"]
    lines = [line for line in campaign.milestones() if line.startswith("generator 1 ")]
    assert [f"version {step} " in line for line, step in zip(lines, (0, 0, 1, 1), strict=True)] == [True] * 4
    events = [event for event in campaign.told() if "sentence" in event.payload]
    assert [event.kind for event in events] == ["generator.lost", "generator.rejoined"] * 2
    assert [event.payload["sentence"] for event in events] == lines
    assert campaign.measured("push_seconds") == [0, 1]
    assert campaign.measured("push_hash_seconds") == [0, 1]
