"""The ends of `direct` in this process, and processes that take part (`direct_process.py`)."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.campaigns import campaigns
from support.stages.failpoints import Failpoints
from support.weights.direct_policies import POLICIES, id_of, shards

from millrace.weights.base import Manifest, Weights, WeightsId, WeightsSender
from millrace.weights.direct.layout import ShardLayout
from millrace.weights.direct.relay import DirectRelay
from millrace.weights.direct.sender import ShardSender
from millrace.weights.fingerprint import fingerprint

PATIENT = 30.0
"""Seconds after which a test gives up waiting for what must come."""


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    """A version's tensors, of several types and odd sizes; its number is the seed."""
    return POLICIES["odd"].tensors(version)


def digest_of(version: int) -> str:
    """The fingerprint's digest of that version."""
    return fingerprint(tensors_of(version)).digest


class ShardedTrainer(WeightsSender):
    """All ranks of a trainer, in this process."""

    def __init__(self, find: Callable[[], str | None], layout: ShardLayout, *, deadline_seconds: float) -> None:
        cpu = torch.device("cpu")
        self._layout = layout
        self.ranks = [
            ShardSender(find, layout, rank, device=cpu, deadline_seconds=deadline_seconds)
            for rank in range(layout.size)
        ]

    def publish(self, weights: Weights) -> None:
        """Takes whole tensors, and has each rank publish its shards."""
        for rank, sender in enumerate(self.ranks):
            sender.publish(Weights(manifest=weights.manifest, tensors=shards(weights.tensors, self._layout, rank)))

    def close(self) -> None:
        for sender in self.ranks:
            sender.close()


class Pushes(WeightsSender):
    """A trainer and sync_weights, in this process; for two ranks of the policy `odd` by default."""

    def __init__(
        self, folder: Path, num_generators: int, *, deadline_seconds: float, layout: ShardLayout | None = None
    ) -> None:
        self.relay = DirectRelay(num_generators, deadline_seconds=deadline_seconds)
        publish_address(folder, self.relay.address)
        layout = layout or POLICIES["odd"].layout(2)
        self.trainer = ShardedTrainer(finder(folder), layout, deadline_seconds=deadline_seconds)
        self.newest: WeightsId | None = None

    def publish(self, weights: Weights) -> None:
        """Publishes from the trainer's ranks to the connected generators."""
        self.trainer.publish(weights)
        offered: list[Weights] = []

        def poll() -> bool:
            result = self.relay.poll(self.newest)
            offered.extend([] if result is None else [result])
            return bool(offered)

        wait_until(poll, f"{weights.id} is offered")
        self.newest = offered[0].id
        self.relay.publish(offered[0])

    def push(self, version: int, tensors: dict[str, torch.Tensor] | None = None) -> None:
        self.publish(Weights(manifest=Manifest(id=id_of(version)), tensors=tensors or tensors_of(version)))

    def retry_until_missing(self, generators: set[int]) -> None:
        """Retries until only these generators are missing the last version."""

        def only_these() -> bool:
            self.relay.poll(self.newest)
            return self.relay.missing == generators

        wait_until(only_these, f"generators other than {generators} get the newest version")

    def deliver(self, version: int) -> None:
        """Delivers this version to all, also to those whose process only just began."""
        self.push(version)
        self.retry_until_missing(set())

    def close(self) -> None:
        self.trainer.close()
        self.relay.close()


def assert_is(received: Weights | None, version: int) -> None:
    assert received is not None
    assert received.id == id_of(version)
    assert fingerprint(received.tensors) == fingerprint(tensors_of(version))


def publish_address(folder: Path, address: str) -> None:
    """Says where sync_weights listens, for `finder`."""
    temporary = folder / f".address.{os.getpid()}"
    temporary.write_text(address)
    temporary.replace(folder / "address")


def finder(folder: Path) -> Callable[[], str | None]:
    """The members' `find`."""
    file = folder / "address"
    return lambda: file.read_text() if file.exists() else None


wait_until = partial(campaigns.wait_until, seconds=PATIENT, every=0.005)


class Child:
    """A process that prints JSON lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> dict[str, Any]:
        """The next line; fails where the process has ended."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        assert text, f"{self.process.args!r} ended with {self.process.wait()}"
        values = json.loads(text)
        assert isinstance(values, dict)
        return values

    def read_until(self, version: int) -> list[dict[str, Any]]:
        """A generator's lines up to the one that says it received this version."""
        lines = [self.line()]
        while lines[-1].get("version") != version:
            lines.append(self.line())
        return lines

    def read_until_all_have(self, version: int) -> None:
        """Reads a sync_weights' lines until no generator is missing this version."""
        while self.line() != {"version": version, "missing": []}:
            pass

    def command(self, text: str) -> None:
        """`offer <version>` to a trainer rank, `measure` to it or to a generator; the answer is the next line."""
        assert self.process.stdin is not None
        # One that has been killed gives no answer.
        with suppress(BrokenPipeError):
            os.write(self.process.stdin.fileno(), f"{text}\n".encode())


def generator(
    folder: Path, number: int, failpoints: Failpoints, *, deadline_seconds: float = PATIENT, transport: str = "direct"
) -> AbstractContextManager[Child]:
    return _child(f"generate-{number}", failpoints, folder, deadline_seconds, transport, 10**9)


def trainer_rank(
    folder: Path,
    rank: int,
    layout: tuple[int, int],
    failpoints: Failpoints,
    *,
    deadline_seconds: float = PATIENT,
    policy: str = "odd",
    transport: str = "direct",
) -> AbstractContextManager[Child]:
    """A rank of a trainer of `layout` (data, tensor) ranks, which offers versions on command."""
    return _child(f"train-{rank}", failpoints, folder, deadline_seconds, transport, *layout, policy)


def sync_weights(
    folder: Path,
    num_generators: int,
    failpoints: Failpoints,
    *,
    deadline_seconds: float = PATIENT,
    transport: str = "direct",
) -> AbstractContextManager[Child]:
    return _child("sync_weights-0", failpoints, folder, deadline_seconds, transport, num_generators)


@contextmanager
def _child(role: str, failpoints: Failpoints, *arguments: object) -> Iterator[Child]:
    script = Path(__file__).with_name("direct_process.py")
    command = [sys.executable, str(script), role, *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=failpoints.environment()
    ) as process:
        try:
            child = Child(process)
            assert child.line() == {"ready": True}
            yield child
        finally:
            process.kill()
