"""Weights and checkpoints leave a pretended GPU once, and what sleeps holds none of its memory."""

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from support.gpu.pretend_gpu import GPU, pretend_gpu
from support.training.sharded_trainers import CASES, make_trainer, samples

from millrace.training.checkpoints.saving import AsyncCheckpoints
from millrace.training.parallel.ranks import ALONE, Ranks
from millrace.weights.base import Manifest, Weights, WeightsId
from millrace.weights.shm import ShmRelay, ShmSender
from storage.checkpoints import CheckpointWriter, load_file, read_latest
from storage.stores.factory import open_store
from storage.stores.memory import SHARED_MEMORY

ID = WeightsId(incarnation=0, policy_version=1, t_offered=0.0)


@pytest.mark.parametrize(("name", "dtype"), [("llama aipo", torch.float32), ("qwen3 lora", torch.bfloat16)])
def test_a_version_is_copied_to_shared_memory_once_in_the_generators_dtype(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    with pretend_gpu() as gpu:
        trainer = make_trainer(CASES[name], Ranks.alone(GPU), None)
        trainer.step(samples(5, seed=0))
        like = {name: torch.empty_like(one, dtype=dtype, device="meta") for name, one in trainer.weights().items()}
        writer, relay = ShmSender(tmp_path / "handover", like, 1), ShmRelay(tmp_path / "handover")
        gpu.forget()
        weights = trainer.weights()
        writer.publish(Weights(manifest=Manifest(id=ID), tensors=weights))
        assert gpu.copied_to_host == {"weights/shm.py:publish": sum(one.nbytes for one in like.values())}
        assert not gpu.waits
    taken = relay.poll(None)
    assert taken is not None
    for name, tensor in taken.tensors.items():
        assert torch.equal(tensor, weights[name].to(dtype))


def test_each_slot_in_shared_memory_is_pinned_once_until_the_sender_is_closed() -> None:
    pinned: list[int] = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: pinned.append(address),
        cudaHostUnregister=pinned.remove,
    )
    tensors = {"weight": torch.arange(1000.0)}
    with (
        TemporaryDirectory(dir=SHARED_MEMORY) as folder,
        pretend_gpu(),
        patch.multiple(torch.cuda, cudart=lambda: cudart, check_error=lambda _: None),
    ):
        like = {"weight": torch.empty_like(tensors["weight"], device="meta")}
        sender = ShmSender(Path(folder, "handover"), like, num_generators=1)
        for version in range(9):
            manifest = Manifest(id=WeightsId(incarnation=0, policy_version=version, t_offered=0.0))
            sender.publish(Weights(manifest=manifest, tensors={"weight": tensors["weight"].to(GPU)}))
        # Without readers it takes the lowest two in turn.
        assert len(pinned) == len(set(pinned)) == 2
        sender.close()
        assert not pinned


def test_without_adapters_the_offered_weights_are_the_live_ones() -> None:
    with pretend_gpu() as gpu:
        trainer = make_trainer(CASES["llama aipo"], Ranks.alone(GPU), None)
        before = gpu.peak = gpu.in_use
        assert all(weight.is_cuda for weight in trainer.weights().values())
        assert gpu.peak == before


def test_a_checkpoint_is_copied_to_the_host_once_and_the_same_trainer_comes_of_it(tmp_path: Path) -> None:
    store, ranks = open_store(str(tmp_path)), Ranks.alone(GPU)
    with pretend_gpu() as gpu, AsyncCheckpoints(store, ranks, CheckpointWriter(store)) as checkpoints:
        trainer = make_trainer(CASES["llama aipo"], ranks, None)
        trainer.step(samples(5, seed=0))
        gpu.forget()
        before = gpu.peak = gpu.in_use
        checkpoints.begin(1, trainer.tensors(), {})
        checkpoints.finish()
        # Weights, both moments, and the number of updates of each.
        sizes = [weight.nbytes for weight in trainer.weights().values()]
        assert gpu.copied_to_host.total() == 3 * sum(sizes) + 4 * len(sizes)
        assert not gpu.waits
        assert gpu.peak == before
        latest = read_latest(store)
        assert latest is not None
        other = make_trainer(CASES["llama aipo"], ranks, None)
        other.restore(1, {name: bytes(load_file(store, ref)) for name, ref in latest.files.items()})
        assert other.state() == trainer.state()
        other.step(samples(5, seed=1))


@pytest.mark.parametrize("name", ["llama aipo", "qwen3 lora"])
def test_a_sleeping_trainer_holds_nothing_on_the_gpu_and_wakes_as_it_was(name: str) -> None:
    case = CASES[name]
    on_cpu = make_trainer(case, ALONE, None)
    with pretend_gpu() as gpu:
        trainer = make_trainer(case, Ranks.alone(GPU), None)
        trainer.step(samples(5, seed=0))
        state = trainer.state()
        gpu.forget()
        trainer.sleep()
        assert gpu.in_use == 0
        # All weights, and both moments and the number of updates of the trained ones; gradients are dropped.
        trained = sum(2 * parameter.nbytes + 4 for parameter in trainer.model.parameters() if parameter.requires_grad)
        every = sum(parameter.nbytes for parameter in trainer.model.parameters())
        rotary = sum(buffer.nbytes for buffer in trainer.model.buffers())
        assert gpu.copied_to_host.total() == every + trained + rotary
        assert trainer.state() == state
        trainer.wake()
        trainer.step(samples(5, seed=1))
    for seed in range(2):
        on_cpu.step(samples(5, seed=seed))
    for mine, other in zip(trainer.weights().values(), on_cpu.weights().values(), strict=True):
        assert torch.equal(mine, other)
