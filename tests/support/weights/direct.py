"""Versions for `direct`, its ends in this process, and processes that take part.

trainer rank   offer 7 ─► {"offered": 7}
sync_weights   ─► {"version": 7, "missing": [], "wire_bytes": …}
generator      ─► {"version": 7, "digest": …} or {"refused": …}
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from support.stages.failpoints import Failpoints
from support.weights.direct_policies import POLICIES

from millrace.weights.base import Manifest, Weights, WeightsId, WeightsWriter
from millrace.weights.direct.control import DirectRelay
from millrace.weights.direct.trainer import ShardSender
from millrace.weights.fingerprint import fingerprint
from millrace.weights.transfer.layout import Layout, TensorSpec
from millrace.weights.transfer.trainer_layouts import fsdp_layout

SCRIPTS = Path(__file__).parent
PATIENT = 30.0
"""Seconds after which a test gives up waiting for what must come."""


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    """A version's tensors, of several types and odd sizes; its number is the seed."""
    return POLICIES["odd"].tensors(version)


def id_of(version: int) -> WeightsId:
    """Of a version."""
    return WeightsId(incarnation=0, policy_version=version, t_offered=version + 0.5)


def digest_of(version: int) -> str:
    """What every process must find in it."""
    return fingerprint(tensors_of(version)).digest


def layout_of(tensors: dict[str, torch.Tensor], size: int) -> Layout:
    """Of a trainer of `size` ranks that shard these."""
    specs = [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    return fsdp_layout(specs, data=size)


def trainer_layout(size: int) -> Layout:
    """Of a trainer of the versions above."""
    return POLICIES["odd"].layout(size, 1)


def shards(tensors: dict[str, torch.Tensor], layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """A rank's parts."""
    return {
        name: tensors[name][tuple(slice(begin, end) for begin, end in box)] for name, box in layout.held(rank).items()
    }


class ShardedTrainer(WeightsWriter):
    """All ranks of a trainer, in this process."""

    def __init__(self, find: Callable[[], str | None], layout: Layout, *, deadline_seconds: float) -> None:
        cpu = torch.device("cpu")
        self._layout = layout
        self.ranks = [
            ShardSender(find, layout, rank, device=cpu, deadline_seconds=deadline_seconds)
            for rank in range(layout.size)
        ]

    def offer(self, weights: Weights) -> None:
        """Takes whole tensors, and has each rank offer its shards."""
        for rank, sender in enumerate(self.ranks):
            parts = shards(dict(weights.tensors), self._layout, rank)
            sender.offer(Weights(manifest=weights.manifest, tensors=parts))

    def close(self) -> None:
        for sender in self.ranks:
            sender.close()


class Push:
    """A trainer of two ranks and sync_weights, in this process."""

    def __init__(self, folder: Path, num_generators: int, *, deadline_seconds: float) -> None:
        self.relay = DirectRelay(num_generators, deadline_seconds=deadline_seconds)
        publish_address(folder, self.relay.address)
        self.trainer = ShardedTrainer(finder(folder), trainer_layout(2), deadline_seconds=deadline_seconds)
        self.newest: WeightsId | None = None

    @property
    def missing(self) -> set[int]:
        return self.relay.missing

    def offer(self, version: int, tensors: dict[str, torch.Tensor] | None = None) -> None:
        """Offers this version, and has it sent to those that are there."""
        manifest = Manifest(id=id_of(version))
        self.trainer.offer(Weights(manifest=manifest, tensors=tensors_of(version) if tensors is None else tensors))
        taken: list[Weights] = []

        def offered() -> bool:
            weights = self.relay.take(self.newest)
            taken.extend([] if weights is None else [weights])
            return bool(taken)

        wait_until(offered, f"version {version} is offered")
        self.newest = taken[0].id
        self.relay.offer(taken[0])

    def tend_until_missing(self, generators: set[int]) -> None:
        """Returns once these alone lack the version offered last."""

        def only_these() -> bool:
            self.relay.tend()
            return self.relay.missing == generators

        wait_until(only_these, f"generators other than {generators} get the newest version")

    def deliver(self, version: int) -> None:
        """Delivers this version to all, also to those whose process only just began."""
        self.offer(version)
        self.tend_until_missing(set())

    def close(self) -> None:
        self.trainer.close()
        self.relay.close()


def assert_is(taken: Weights | None, version: int) -> None:
    """That this version was taken, every bit of it."""
    assert taken is not None
    assert taken.id == id_of(version)
    assert fingerprint(taken.tensors).digest == digest_of(version)
    for name, tensor in tensors_of(version).items():
        assert (taken.tensors[name].dtype, taken.tensors[name].shape) == (tensor.dtype, tensor.shape), name


def publish_address(folder: Path, address: str) -> None:
    """Says where sync_weights listens, for `finder`."""
    temporary = folder / f".address.{os.getpid()}"
    temporary.write_text(address)
    temporary.replace(folder / "address")


def finder(folder: Path) -> Callable[[], str | None]:
    """The members' `find`."""
    file = folder / "address"
    return lambda: file.read_text() if file.exists() else None


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Returns once the condition holds; AssertionError where that does not come about."""
    limit = time.monotonic() + PATIENT
    while not condition():
        assert time.monotonic() < limit, f"waited in vain: {what}"
        time.sleep(0.005)


class Child:
    """A process that prints JSON lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> dict[str, Any]:
        """The next line; fails where the process has ended."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        assert text, f"{self.process.args!r} ended with {self.process.wait()}"
        found = json.loads(text)
        assert isinstance(found, dict)
        return found

    def read_until(self, version: int) -> list[dict[str, Any]]:
        """A generator's lines up to the one that says it took this version."""
        lines = [self.line()]
        while lines[-1].get("version") != version:
            lines.append(self.line())
        return lines

    def read_until_all_have(self, version: int) -> dict[str, Any]:
        """The line of a sync_weights that says nobody lacks this version."""
        line = self.line()
        while line.get("version") != version or line["missing"]:
            line = self.line()
        return line

    def offer(self, version: int) -> None:
        """Commands a trainer rank; its answer is the next line."""
        self._command(f"offer {version}")

    def measured(self) -> dict[str, Any]:
        """What a trainer rank or a measured generator has sent and held so far, in bytes."""
        self._command("measure")
        return self.line()

    def _command(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()


@contextmanager
def generator(
    folder: Path, number: int, failpoints: Failpoints, *, deadline_seconds: float, until: int = 10**9
) -> Iterator[Child]:
    """A generator that takes what comes; it ends by itself after version `until`."""
    with _child("direct_generator.py", failpoints, folder, number, deadline_seconds, until) as child:
        yield child


@contextmanager
def trainer_rank(
    folder: Path,
    rank: int,
    size: int,
    failpoints: Failpoints,
    *,
    deadline_seconds: float,
    tensor: int = 1,
    policy: str = "odd",
) -> Iterator[Child]:
    """A rank of a trainer of `size` ranks, `tensor` of them in a row, which offers what it is told to."""
    with _child(
        "direct_trainer.py", failpoints, folder, rank, size // tensor, tensor, policy, deadline_seconds
    ) as child:
        yield child


@contextmanager
def sync_weights(
    folder: Path, num_generators: int, failpoints: Failpoints, *, deadline_seconds: float
) -> Iterator[Child]:
    """A sync_weights that has what is offered sent on."""
    with _child("direct_sync.py", failpoints, folder, num_generators, deadline_seconds) as child:
        yield child


@contextmanager
def measured_rank(folder: Path, rank: int, size: int, failpoints: Failpoints) -> Iterator[Child]:
    """A rank of a trainer of `size` ranks that has the policy `large`."""
    with _child("direct_measured.py", failpoints, folder, "rank", rank, size) as child:
        yield child


@contextmanager
def measured_generator(folder: Path, number: int, failpoints: Failpoints) -> Iterator[Child]:
    """A generator that takes what comes; it has no model of its own."""
    with _child("direct_measured.py", failpoints, folder, "generator", number) as child:
        yield child


@contextmanager
def _child(script: str, failpoints: Failpoints, *arguments: object) -> Iterator[Child]:
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=failpoints.environment()
    ) as process:
        try:
            child = Child(process)
            assert child.line() == {"ready": True}
            yield child
        finally:
            process.kill()
