"""Checkpoints are written in the background: a snapshot, whole, and one at a time."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.campaigns.campaigns import wait_until
from support.stages.failpoints import Failpoints
from support.stores.dict_store import DictStore

from millrace.training.checkpoints.names import MODEL, OPTIMIZER
from millrace.training.checkpoints.policy_state import load_weights
from millrace.training.checkpoints.saving import AsyncCheckpoints
from millrace.training.parallel.ranks import ALONE
from storage.checkpoints import Checkpoint, CheckpointWriter, read_latest
from storage.errors import Fenced
from storage.stores.base import BytesLike, Store
from storage.stores.factory import open_store

ROOT = Path(__file__).parents[4]


class Gate(DictStore):
    """Writes of data wait at a gate; while it is broken they fail."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.reached = threading.Event(), threading.Event()
        self.broken = False
        self.waiting = self.most_waiting = 0

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        if "/data/" in path:
            self.waiting += 1
            self.most_waiting = max(self.waiting, self.most_waiting)
            self.reached.set()
            self.open.wait()
            self.waiting -= 1
            if self.broken:
                raise OSError("the disk is gone")
        return super().put_if_absent(path, data)


@pytest.fixture
def gate() -> Iterator[Gate]:
    store = Gate()
    yield store
    store.open.set()


def saver(store: Store) -> AsyncCheckpoints:
    return AsyncCheckpoints(store, ALONE, CheckpointWriter(store))


def tensors(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {MODEL: {"weight": torch.full((3, 2), value)}}


def latest(store: Store) -> Checkpoint:
    checkpoint = read_latest(store)
    assert checkpoint is not None
    return checkpoint


def test_what_training_changes_meanwhile_is_not_in_the_checkpoint(gate: Gate) -> None:
    live = tensors(1.0)
    state: dict[str, Any] = {"account": {"trained": 1}}
    with saver(gate) as checkpoints:
        checkpoints.begin(1, live, state)
        gate.reached.wait()
        assert read_latest(gate) is None, "the record comes last"
        live[MODEL]["weight"].fill_(2.0)
        state["account"]["trained"] = 2
        gate.open.set()
    checkpoint = latest(gate)
    assert (checkpoint.step, checkpoint.state) == (1, {"account": {"trained": 1}})
    assert torch.equal(load_weights(gate, checkpoint, {})["weight"], torch.full((3, 2), 1.0))


class Turnstile(DictStore):
    """Writes of data pass one by one, as they are let through."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = threading.Semaphore(0)

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        if "/data/" in path:
            self.passes.acquire()
        return super().put_if_absent(path, data)


def test_whoever_waits_for_a_checkpoint_tells_of_each_file_that_is_written_meanwhile() -> None:
    store = Turnstile()
    progress: list[None] = []
    live = {MODEL: {name: torch.full((3, 2), 1.0) for name in ("one", "two", "three")}}
    with AsyncCheckpoints(store, ALONE, CheckpointWriter(store), most_bytes=25) as checkpoints:
        checkpoints.on_progress = lambda: progress.append(None)
        checkpoints.begin(1, live, {})
        waiting = threading.Thread(target=checkpoints.finish)
        waiting.start()
        for passed in (1, 2):
            assert len(progress) == passed - 1, "waiting alone is not progress"
            store.passes.release()
            wait_until(lambda passed=passed: len(progress) == passed, "the progress of a file")
        store.passes.release()
        waiting.join()
    assert len(latest(store).files) == 3


def test_the_next_one_waits_for_the_one_before(gate: Gate) -> None:
    done = threading.Event()

    def save_both() -> None:
        with saver(gate) as checkpoints:
            checkpoints.begin(1, tensors(1.0), {})
            checkpoints.begin(2, tensors(2.0), {})
        done.set()

    thread = threading.Thread(target=save_both)
    thread.start()
    gate.reached.wait()
    assert not done.is_set()
    gate.open.set()
    thread.join()
    assert gate.most_waiting == 1
    assert latest(gate).step == 2
    assert torch.equal(load_weights(gate, latest(gate), {})["weight"], torch.full((3, 2), 2.0))


def test_memory_is_taken_once_unless_shapes_change(gate: Gate) -> None:
    gate.open.set()
    with saver(gate) as checkpoints:
        for step, tensor in enumerate([torch.ones(4), torch.zeros(4), torch.ones(2, 3), torch.ones(2, 3).double()]):
            checkpoints.begin(step, {MODEL: {"weight": tensor}}, {})
            checkpoints.finish()
            weight = load_weights(gate, latest(gate), {})["weight"]
            assert torch.equal(weight, tensor)
            assert weight.dtype == tensor.dtype


def test_more_than_one_file_may_hold_goes_into_several(gate: Gate) -> None:
    gate.open.set()
    named = {name: torch.full((size,), float(size)) for name, size in {"a": 2, "b": 3, "c": 9, "d": 1, "e": 1}.items()}
    with AsyncCheckpoints(gate, ALONE, CheckpointWriter(gate), most_bytes=20) as checkpoints:
        checkpoints.begin(1, {MODEL: named, OPTIMIZER: {}}, {})
    files = latest(gate).files
    assert set(files) == {"model.safetensors", "model.1.safetensors", "model.2.safetensors", "optimizer.safetensors"}
    whole = load_weights(gate, latest(gate), {})
    assert all(torch.equal(whole[name], tensor) for name, tensor in named.items())


@pytest.mark.parametrize("call", ["begin", "finish", "end of the block"])
def test_what_went_wrong_is_raised_by_the_next_call_and_the_checkpoint_before_stays(gate: Gate, call: str) -> None:
    gate.open.set()
    with pytest.raises(OSError), saver(gate) as checkpoints:
        checkpoints.begin(1, tensors(1.0), {})
        checkpoints.finish()
        gate.broken = True
        checkpoints.begin(2, tensors(2.0), {})
        if call == "begin":
            checkpoints.begin(3, tensors(3.0), {})
        elif call == "finish":
            checkpoints.finish()
    assert latest(gate).step == 1


def test_a_look_in_between_raises_it_too_and_waits_for_nothing(gate: Gate) -> None:
    gate.broken = True
    with saver(gate) as checkpoints:
        checkpoints.begin(1, tensors(1.0), {})
        gate.reached.wait()
        checkpoints.check()
        gate.open.set()
        with pytest.raises(OSError):
            while True:
                checkpoints.check()


def test_a_trainer_that_was_fenced_hears_of_it(gate: Gate) -> None:
    gate.open.set()
    with pytest.raises(Fenced), saver(gate) as checkpoints:
        newer = CheckpointWriter(gate)
        checkpoints.begin(1, tensors(1.0), {})
        checkpoints.finish()
    assert newer.latest is None
    assert read_latest(gate) is None


def test_an_error_of_training_is_not_hidden_by_one_of_saving(gate: Gate) -> None:
    gate.open.set()
    gate.broken = True
    with pytest.raises(ZeroDivisionError) as caught, saver(gate) as checkpoints:
        checkpoints.begin(1, tensors(1.0), {})
        raise ZeroDivisionError("of training")
    assert caught.value.__notes__ == ["the checkpoint in flight failed too: OSError('the disk is gone')"]


def test_an_error_of_training_waits_for_the_checkpoint_that_is_on_its_way(gate: Gate) -> None:
    gate.open.set()
    with pytest.raises(ZeroDivisionError), saver(gate) as checkpoints:
        checkpoints.begin(1, tensors(1.0), {})
        raise ZeroDivisionError("of training")
    assert latest(gate).step == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["put.mid:checkpoints/data/*", "put.after:checkpoints/data/*", "put.before:checkpoints/log/*"]
)
def test_a_trainer_killed_before_the_record_leaves_the_checkpoint_before(place: str, tmp_path: Path) -> None:
    # The log's first record is the writer's fence.
    nth = 3 if "data" in place else 4
    armed = Failpoints(tmp_path / "fired", f"trainer {place} {nth} kill")
    ended = subprocess.run(
        [sys.executable, "-m", "support.training.saved_in_the_background", str(tmp_path / "run"), "trainer", "9"],
        env={**armed.environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    assert armed.missed() == []
    store = open_store(str(tmp_path / "run"))
    checkpoint = latest(store)
    assert (checkpoint.step, checkpoint.state) == (1, {"version": 1})
    assert torch.equal(load_weights(store, checkpoint, {})["weight"], torch.full((100,), 1.0))
