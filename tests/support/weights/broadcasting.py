"""Versions to broadcast, and processes that take part: generators that say what they took, a sync_weights to command.

generator: take ─► {"version": 7, "digest": …} or {"refused": …}      sync_weights: offer 7, tend ─► {"missing": […]}
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from support.stages.failpoints import Failpoints

from millrace.weights.base import Manifest, Weights, WeightsId
from millrace.weights.broadcast import BroadcastReader, BroadcastWriter
from millrace.weights.fingerprint import fingerprint

SCRIPTS = Path(__file__).parent
CHUNKS = 3
"""In how many chunks one version travels."""
PATIENT = 30.0
"""Seconds after which a test gives up waiting for what must come."""


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    """A version's tensors: two that travel alone and small ones of several types; its number is the seed."""
    random = torch.Generator().manual_seed(version)
    return {
        "embed": torch.randn(300_000, generator=random),
        "scale": torch.randn((), generator=random),
        "norm": torch.randn(3, generator=random).bfloat16(),
        "head": torch.randn(700, 1000, generator=random).bfloat16(),
        "bias": torch.randn(5, 3, generator=random).double(),
    }


def weights_of(version: int) -> Weights:
    """What sync_weights offers as this version."""
    tensors = tensors_of(version)
    weights_id = WeightsId(incarnation=0, policy_version=version, t_offered=version + 0.5)
    return Weights(manifest=Manifest(id=weights_id, fingerprint=fingerprint(tensors)), tensors=tensors)


def digest_of(version: int) -> str:
    """What every process must find in it."""
    return fingerprint(tensors_of(version)).digest


def assert_is(taken: Weights | None, version: int) -> None:
    """That this version was taken, every bit of it."""
    assert taken is not None
    assert taken.id == weights_of(version).id
    assert fingerprint(taken.tensors).digest == digest_of(version)
    for name, tensor in tensors_of(version).items():
        assert (taken.tensors[name].dtype, taken.tensors[name].shape) == (tensor.dtype, tensor.shape), name


def publish_address(folder: Path, address: str) -> None:
    """Says where sync_weights listens, for `finder`."""
    temporary = folder / f".address.{os.getpid()}"
    temporary.write_text(address)
    temporary.replace(folder / "address")


def finder(folder: Path) -> Callable[[], str | None]:
    """The generators' `find`."""
    file = folder / "address"
    return lambda: file.read_text() if file.exists() else None


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Returns once the condition holds; AssertionError where that does not come about."""
    limit = time.monotonic() + PATIENT
    while not condition():
        assert time.monotonic() < limit, f"waited in vain: {what}"
        time.sleep(0.005)


def tend_until_missing(writer: BroadcastWriter, generators: set[int]) -> None:
    """Returns once these alone lack the version offered last."""

    def only_these() -> bool:
        writer.tend()
        return writer.missing == generators

    wait_until(only_these, f"generators other than {generators} get the newest version")


def offer_and_tend(writer: BroadcastWriter, version: int) -> None:
    """Delivers this version to all, also to those whose process only just began."""
    writer.offer(weights_of(version))
    tend_until_missing(writer, set())


@contextmanager
def broadcast_writer(folder: Path, num_generators: int, *, deadline_seconds: float) -> Iterator[BroadcastWriter]:
    """sync_weights' end in this process, found by all generators of this folder."""
    with closing(BroadcastWriter(num_generators, deadline_seconds=deadline_seconds)) as writer:
        publish_address(folder, writer.address)
        yield writer


@contextmanager
def broadcast_reader(folder: Path, number: int, *, deadline_seconds: float) -> Iterator[BroadcastReader]:
    """A generator's end in this process."""
    path = folder / f"received-{number}"
    with closing(BroadcastReader(finder(folder), number, path, deadline_seconds=deadline_seconds)) as reader:
        yield reader


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

    def tell(self, command: str) -> None:
        """Commands a sync_weights; its answer is the next line."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def ask(self, command: str) -> dict[str, Any]:
        """Commands a sync_weights and waits for its answer."""
        self.tell(command)
        return self.line()


@contextmanager
def generator(
    folder: Path, number: int, failpoints: Failpoints, *, deadline_seconds: float, until: int = 10**9
) -> Iterator[Child]:
    """A generator that takes what comes; it ends by itself after version `until`."""
    with _child("broadcast_generator.py", failpoints, folder, number, deadline_seconds, until) as child:
        assert child.line() == {"ready": True}
        yield child


@contextmanager
def sync_weights(
    folder: Path, num_generators: int, failpoints: Failpoints, *, deadline_seconds: float
) -> Iterator[Child]:
    """A sync_weights that does what it is told: `offer <version>`, `tend`, `deliver <version>`."""
    with _child("broadcast_sync.py", failpoints, folder, num_generators, deadline_seconds) as child:
        assert child.line() == {"ready": True}
        yield child


@contextmanager
def _child(script: str, failpoints: Failpoints, *arguments: object) -> Iterator[Child]:
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=failpoints.environment()
    ) as process:
        try:
            yield Child(process)
        finally:
            process.kill()
