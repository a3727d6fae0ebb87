"""The benchmark of weights, whole and tiny; the figures themselves are taken by hand."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.weights.__main__ import targets_met
from benchmarks.weights.policy import FlippedPolicy, TrainedPolicy, llama_shapes
from benchmarks.weights.push import PARTS, PushCase, measure_pushes

_ROOT = Path(__file__).parents[2]
_TINY = 20_000


def _count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


@pytest.mark.parametrize("num_parameters", [1_000_000, 100_000_000, 500_000_000, 8_000_000_000])
def test_a_llama_has_about_the_parameters_asked_for(num_parameters: int) -> None:
    assert _count(llama_shapes(num_parameters)) == pytest.approx(num_parameters, rel=0.06)


def test_a_flipped_version_has_another_bit_in_every_element() -> None:
    policy = FlippedPolicy({"matrix": (4, 8), "norm": (8,)}, torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in policy.tensors.items()}
    policy.step()
    for name, tensor in policy.tensors.items():
        assert bool((tensor.view(torch.int16) != before[name].view(torch.int16)).all()), name


def test_a_trained_version_differs_from_the_one_before_in_few_elements() -> None:
    policy = TrainedPolicy({"matrix": (200, 500), "norm": (500,)})
    before = policy.tensors["matrix"].clone()
    policy.step()
    share = (policy.tensors["matrix"] != before).float().mean().item()
    assert 0.0 < share < 0.1
    assert policy.tensors["matrix"].dtype == torch.bfloat16


# `measure_pushes` itself raises where the digests of the three processes differ.
@pytest.mark.extended
@pytest.mark.parametrize(
    ("way", "least_sent", "most_sent"),
    [
        ("shm", 0.0, 0.0),
        ("memory", 1.0, 1.2),
        ("delta", 0.001, 0.25),
    ],
)
def test_a_whole_measurement_has_every_figure_and_leaves_nothing_behind(
    way: str, least_sent: float, most_sent: float, tmp_path: Path
) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    case = PushCase(num_parameters=_TINY, dtype="bfloat16", way=way)
    pushes = measure_pushes(case, memory=memory, disk=disk, num_pushes=2)
    assert pushes["parameters"] == _count(llama_shapes(_TINY))
    assert pushes["bytes"] == 2 * pushes["parameters"]
    assert least_sent <= pushes["wire_bytes"] / pushes["bytes"] <= most_sent
    times = pushes["all_seconds"]
    assert {len(values) for values in times.values()} == {2}
    for name in ("floor", "memcpy", "live", "copy", "load"):
        assert min(times[name]) > 0, name
    for each in range(2):
        assert sum(times[part][each] for part in PARTS) == pytest.approx(times["live"][each])
    assert pushes["of_floor"] > 0
    assert [*memory.iterdir(), *disk.iterdir()] == []


def test_targets_are_those_of_shared_memory_and_of_deltas() -> None:
    shm = {"device": "cpu", "way": "shm", "parameters": 1e8, "dtype": "float32"}
    good = {**shm, "of_floor": 0.71, "stall_over_memcpy": 1.19}
    bad = {**shm, "dtype": "bfloat16", "of_floor": 0.69, "stall_over_memcpy": 1.21}
    delta = {**shm, "way": "delta", "dtype": "bfloat16", "saved": 49.0}
    store = {**shm, "way": "store"}
    assert targets_met([good, bad, delta, store]) == {
        "live, share of the floor, 100 M float32": True,
        "trainer blocked, 100 M float32": True,
        "live, share of the floor, 100 M bfloat16": False,
        "trainer blocked, 100 M bfloat16": False,
        "delta, 100 M bfloat16": False,
    }
