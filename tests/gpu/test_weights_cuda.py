"""Weights from a GPU through shared memory into a GPU: bit for bit, and measured as the benchmark measures."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from benchmarks.weights.policy import FlippedPolicy, llama_shapes
from benchmarks.weights.push import PushCase, copy_rates, measure_pushes
from millrace.weights.base import Manifest, Weights, WeightsId
from millrace.weights.shm import ShmReceiver, ShmRelay, ShmSender
from storage.stores.memory import SHARED_MEMORY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

_FEW = 1_000_000


@pytest.fixture(params=["in shared memory", "on a disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with TemporaryDirectory(dir=SHARED_MEMORY if request.param == "in shared memory" else tmp_path) as name:
        yield Path(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_gpu_hands_over_arrives_bit_for_bit(folder: Path, dtype: torch.dtype) -> None:
    policy = FlippedPolicy(llama_shapes(_FEW), dtype, "cuda")
    path = folder / "handover"
    weights_id = WeightsId(incarnation=0, policy_version=1, t_offered=0.0)
    with (
        closing(ShmSender(path, policy.tensors, 1)) as trainer,
        closing(ShmRelay(path)) as sync,
        closing(ShmReceiver(path, 0)) as generator,
    ):
        trainer.publish(Weights(manifest=Manifest(id=weights_id), tensors=policy.tensors))
        taken = sync.poll(None)
        assert taken is not None
        sync.publish(taken)
        received = generator.poll(None)
        assert received is not None
        for name, tensor in policy.tensors.items():
            assert torch.equal(received.tensors[name].cuda(), tensor), name


def test_the_benchmark_measures_a_hand_over_from_gpu_to_gpu(folder: Path) -> None:
    case = PushCase(num_parameters=_FEW, dtype="bfloat16", way="shm", device="cuda")
    pushes = measure_pushes(case, memory=folder, disk=folder, num_pushes=2)
    assert pushes["device"] == "cuda"
    assert min(pushes["all_seconds"]["live"]) > 0


def test_copy_rates_are_measured_in_every_direction() -> None:
    rates = copy_rates(1 << 24)
    assert len(rates) == 6
    assert min(rates.values()) > 0
