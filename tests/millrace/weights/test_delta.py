"""A delta leads from one version to the bits of the next, and from no other version."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import WeightsCorrupt
from millrace.weights import delta
from millrace.weights.fingerprint import fingerprint

Tensors = dict[str, torch.Tensor]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int64)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, chooser: np.random.Generator) -> torch.Tensor:
    """Any bits: NaNs of all kinds, infinities, denormals and both zeros among them."""
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(-1).view(torch.uint8)[:] = torch.from_numpy(chooser.integers(0, 256, tensor.nbytes, np.uint8))
    return tensor


def changed(tensor: torch.Tensor, rate: float, chooser: np.random.Generator) -> torch.Tensor:
    """A copy in which about that share of the elements has any other bits."""
    struck = torch.from_numpy(np.asarray(chooser.random(tuple(tensor.shape)) < rate))
    return torch.where(struck, random_bits(tuple(tensor.shape), tensor.dtype, chooser), tensor)


def step(old: Tensors, new: Tensors) -> tuple[Tensors, bytes]:
    """Returns a copy of `old` to which the delta was applied, and the delta."""
    tensors = {name: tensor.clone() for name, tensor in old.items()}
    data = delta.encode(old, new, base="base", digest="digest")
    assert delta.apply(tensors, data, holds="base") == "digest"
    return tensors, data


def assert_same_bits(tensors: Tensors, expected: Tensors, why: str = "") -> None:
    assert fingerprint(tensors) == fingerprint(expected), why


def test_nan_zeros_infinities_and_denormals_arrive_bit_for_bit() -> None:
    values = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 1.0, 65504.0, 3e38]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        special = torch.tensor(values).to(dtype)
        count = len(values)
        old = {"all pairs": special.repeat(count)}
        new = {"all pairs": special.repeat_interleave(count)}
        tensors, _ = step(old, new)
        assert_same_bits(tensors, new, str(dtype))
    payloads = torch.tensor([0x7F800001, 0x7FC12345, -1, 0x00000001], dtype=torch.int32).view(torch.float32)
    tensors, _ = step({"nan": torch.zeros(4)}, {"nan": payloads})
    assert tensors["nan"].view(torch.int32).tolist() == payloads.view(torch.int32).tolist()


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    made=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3)), max_size=5),
    rate=st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_delta_restores_the_newer_version_for_any_tensors(
    made: list[tuple[torch.dtype, list[int]]], rate: float, seed: int
) -> None:
    chooser = np.random.default_rng(seed)
    old = {f"t{n}": random_bits(tuple(shape), dtype, chooser) for n, (dtype, shape) in enumerate(made)}
    new = {name: changed(tensor, rate, chooser) for name, tensor in old.items()}
    tensors, _ = step(old, new)
    assert_same_bits(tensors, new, f"seed {seed}")
    # Neither the order of names nor the layout in memory is part of a version.
    turned = {name: new[name].mT.contiguous().mT if new[name].dim() > 1 else new[name] for name in reversed(new)}
    again = {name: old[name].clone() for name in reversed(old)}
    delta.apply(again, delta.encode(old, turned, base="a", digest="b"), holds="a")
    assert_same_bits(again, new, f"seed {seed}")


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 100_000])
def test_changes_lie_any_distance_apart(gap: int) -> None:
    old = {"first": torch.zeros(7, dtype=torch.bfloat16), "second": torch.zeros(gap + 2, dtype=torch.float32)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["second"][0], new["second"][-1] = 1.0, -1.0
    tensors, _ = step(old, new)
    assert_same_bits(tensors, new)


def test_the_delta_of_a_small_adamw_step_is_a_twentieth_of_the_version() -> None:
    seed = 6
    random = torch.Generator().manual_seed(seed)
    parameter = torch.nn.Parameter(0.02 * torch.randn(1000, 1000, generator=random))
    optimizer = torch.optim.AdamW([parameter], lr=1e-6)
    versions = []
    for _ in range(4):
        parameter.grad = torch.randn(parameter.shape, generator=random)
        optimizer.step()
        versions.append({"w": parameter.detach().bfloat16()})
    for old, new in itertools.pairwise(versions):
        tensors, data = step(old, new)
        assert_same_bits(tensors, new)
        assert delta.share_changed(old, new) < 0.05
        ratio = new["w"].nbytes / len(data)
        assert ratio >= 20, f"{ratio:.1f} times smaller (seed {seed})"


def test_a_delta_for_another_version_is_refused() -> None:
    versions = [{"w": torch.full((5,), float(n))} for n in range(4)]
    digests = [fingerprint(version).digest for version in versions]
    second = delta.encode(versions[1], versions[2], base=digests[1], digest=digests[2])
    for n in (0, 2, 3):
        tensors = {"w": versions[n]["w"].clone()}
        with pytest.raises(WeightsCorrupt):
            delta.apply(tensors, second, holds=digests[n])
        assert_same_bits(tensors, versions[n])
    tensors = {"w": versions[1]["w"].clone()}
    assert delta.apply(tensors, second, holds=digests[1]) == digests[2]
    assert_same_bits(tensors, versions[2])


@pytest.mark.parametrize(
    "other",
    [{"v": torch.zeros(4)}, {"w": torch.zeros(5)}, {"w": torch.zeros(2, 2)}, {"w": torch.zeros(4).bfloat16()}, {}],
    ids=["name", "length", "shape", "dtype", "missing"],
)
def test_other_tensors_are_refused(other: Tensors) -> None:
    old, new = {"w": torch.zeros(4)}, {"w": torch.ones(4)}
    with pytest.raises(ValueError):
        delta.encode(old, other, base="a", digest="b")
    with pytest.raises(WeightsCorrupt):
        delta.apply(other, delta.encode(old, new, base="a", digest="b"), holds="a")


def test_an_invalid_delta_is_refused() -> None:
    tensors = {"w": torch.zeros(4)}
    data = bytearray(delta.encode(tensors, {"w": torch.ones(4)}, base="a", digest="b"))
    with pytest.raises(WeightsCorrupt):
        delta.apply(tensors, json.dumps({}).encode(), holds="a")
    data[8] += 1
    with pytest.raises(WeightsCorrupt):
        delta.apply(tensors, data, holds="a")
    assert_same_bits(tensors, {"w": torch.zeros(4)})


def test_the_changed_share_is_estimated_from_a_sample() -> None:
    chooser = np.random.default_rng(3)
    old = {"w": torch.zeros(500, 1000), "norm": torch.zeros(64)}
    for rate in (0.0, 0.02, 0.3, 1.0):
        struck = torch.from_numpy(chooser.random((500, 1000)) < rate)
        new = {"w": struck.float(), "norm": old["norm"]}
        assert abs(delta.share_changed(old, new) - rate) < 0.02, f"{rate} (seed 3)"
    assert delta.share_changed({}, {}) == 0.0
