"""The trainer, sync_weights and generators of a host as processes that race, freeze, and are killed at any moment."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from support.stages.failpoints import Failpoints, go_on, wait_until_stopped
from support.weights.versions import mixed, mixed_tensors, sha256

from millrace.weights.fingerprint import fingerprint
from millrace.weights.shm import ShmRelay, ShmSender

PROCESS = Path(__file__).parents[2] / "support/weights/weights_process.py"
SHAPES = {"big": torch.zeros(200_000), "bigger": torch.zeros(300_000), "small": torch.zeros(3, dtype=torch.bfloat16)}

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(role, *arguments, env=…)`: a child that does not outlive the test."""
    with ExitStack() as stack:

        def started(role: str, *arguments: object, env: dict[str, str] | None = None) -> "subprocess.Popen[str]":
            command = [sys.executable, str(PROCESS), role, *map(str, arguments)]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
            stack.callback(_end, child)
            return child

        yield started


def _end(child: "subprocess.Popen[str]") -> None:
    with child:
        child.kill()


def filled(version: int) -> dict[str, torch.Tensor]:
    """Every tensor of version v is full of v: any mixture is seen."""
    return {name: torch.full_like(tensor, version) for name, tensor in SHAPES.items()}


@pytest.mark.slow
def test_generators_take_whole_versions_in_order_while_the_trainer_waits_for_none(tmp_path: Path, start: Start) -> None:
    versions = 257  # bfloat16 counts exactly so far
    writer = ShmSender(tmp_path / "handover", SHAPES, num_generators=2)
    takers = [start(f"race-{generator}", tmp_path, versions) for generator in range(2)]
    for taker in takers:
        assert taker.stdout is not None
        assert taker.stdout.readline() == "ready\n"
    start("sync_weights", tmp_path)
    for version in range(versions):
        writer.publish(mixed(version, tensors=filled(version)))
    counts = [int(taker.communicate()[0]) for taker in takers]
    assert [taker.returncode for taker in takers] == [0, 0]
    assert all(1 <= count <= versions for count in counts)


@pytest.mark.slow
def test_a_frozen_generator_holds_no_other_up_and_goes_on_with_a_whole_version(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "handover"
    armed = Failpoints(tmp_path / "fired", "generate-1 weights.mid_hash 2 stop")
    writer, relay = ShmSender(path, SHAPES, num_generators=2), ShmRelay(path)

    def deliver(version: int) -> None:
        writer.publish(mixed(version, tensors=filled(version)))
        taken = relay.poll(None)
        assert taken is not None
        relay.publish(taken)

    frozen = start("race-1", tmp_path, 201, env=armed.environment())
    deliver(0)
    # It has hashed two of the three tensors.
    assert wait_until_stopped(frozen)
    assert armed.missed() == []
    free = start("race-0", tmp_path, 101)
    assert free.stdout is not None
    assert free.stdout.readline() == "ready\n"
    for version in range(1, 101):
        deliver(version)
    free.communicate()
    assert free.returncode == 0
    go_on(frozen)
    deliver(200)
    # The version that it was frozen in, whole, and a later one.
    assert int(frozen.communicate()[0].split()[-1]) >= 2
    assert frozen.returncode == 0


STORMS = [0, *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(1, 21))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", STORMS)
def test_two_hundred_versions_arrive_bit_for_bit_though_every_process_is_killed(
    tmp_path: Path, start: Start, seed: int
) -> None:
    versions, draw = 200, random.Random(seed)
    armed = Failpoints(
        tmp_path / "fired",
        # Five tensors a version; a failpoint's count restarts in the successor of its process.
        f"train weights.mid_copy {draw.randint(50, 200)} kill",
        f"sync_weights weights.mid_hash {draw.randint(50, 200)} kill",
        f"sync_weights sync_weights.before_push {draw.randint(50, 80)} kill",
        f"generate-0 weights.mid_hash {draw.randint(50, 400)} kill",
        f"generate-1 weights.mid_hash {draw.randint(50, 400)} kill",
    )
    deaths = _run_until_done(tmp_path, start, armed.environment(), versions)
    assert armed.missed() == [], f"seed {seed}"
    assert deaths == len(armed.armed), f"seed {seed}"
    for generator in range(2):
        taken = [line.split() for line in (tmp_path / f"taken-{generator}").read_text().splitlines()]
        assert {int(version) for _, version, _, _ in taken} == set(range(versions)), f"seed {seed}"
        ids = [(int(incarnation), int(version)) for incarnation, version, _, _ in taken]
        assert ids == sorted(ids), f"seed {seed}: generator {generator} went back"
        for incarnation, version, digest, other_hash in taken:
            expected = mixed_tensors(int(version), int(incarnation))
            assert digest == fingerprint(expected).digest, f"seed {seed}: {version} at generator {generator}"
            assert other_hash == sha256(expected), f"seed {seed}: {version} at generator {generator}"


def _run_until_done(folder: Path, start: Start, env: dict[str, str], versions: int) -> int:
    """Starts all four, and restarts the killed, until the generators have the last version. Returns how many died."""
    incarnations = 0

    def begin(role: str) -> "subprocess.Popen[str]":
        nonlocal incarnations
        if role == "train":
            incarnations += 1
            return start(role, folder, incarnations, versions, env=env)
        return start(role, folder, *([] if role == "sync_weights" else [versions]), env=env)

    running = {role: begin(role) for role in ("train", "sync_weights", "generate-0", "generate-1")}
    deaths = 0
    while running.keys() != {"sync_weights"}:
        time.sleep(0.02)
        for role, child in list(running.items()):
            if child.poll() == -signal.SIGKILL:
                deaths += 1
                running[role] = begin(role)
            elif child.returncode is not None:
                assert child.returncode == 0, f"{role} ended with {child.returncode}"
                del running[role]
    return deaths
