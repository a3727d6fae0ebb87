"""Engines on a CPU use packed weights, which follow every change of the weights and leave gradients alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from millrace.generation.engines.packed_linears import pack_linears

FEATURES = 512
ROWS = [1, 16, 300]


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def linear(request: pytest.FixtureRequest) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, 2 * FEATURES, bias=request.param)


def assert_same(linear: nn.Linear, inputs: torch.Tensor) -> None:
    expected = nn.functional.linear(inputs, linear.weight, linear.bias)
    torch.testing.assert_close(linear(inputs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
def test_a_packed_layer_gives_the_same_products(linear: nn.Linear, rows: int) -> None:
    pack_linears(linear)
    with torch.inference_mode():
        assert_same(linear, torch.randn(rows, 1, FEATURES))


@pytest.mark.parametrize(
    "change",
    [
        lambda linear: linear.weight.mul_(2),
        lambda linear: linear.weight.copy_(torch.randn_like(linear.weight) / FEATURES),
        lambda linear: setattr(linear.weight, "data", torch.randn_like(linear.weight) / FEATURES),
        lambda linear: (linear.to(torch.float64).weight.mul_(3), linear.to(torch.float32)),
    ],
    ids=["scaled in place", "copied into", "replaced", "changed in another type"],
)
def test_a_packed_layer_follows_changes_of_its_weight(linear: nn.Linear, change: Callable[[nn.Linear], object]) -> None:
    pack_linears(linear)
    inputs = torch.randn(16, FEATURES)
    with torch.inference_mode():
        linear(inputs)
    with torch.no_grad():
        change(linear)
    with torch.inference_mode():
        assert_same(linear, inputs)


def test_gradients_of_a_packed_layer_are_those_of_a_plain_one(linear: nn.Linear) -> None:
    inputs = torch.randn(16, FEATURES)
    (expected,) = torch.autograd.grad(linear(inputs).square().sum(), linear.weight)
    pack_linears(linear)
    (gradient,) = torch.autograd.grad(linear(inputs).square().sum(), linear.weight)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_compute_as_before(linear: nn.Linear, dtype: torch.dtype) -> None:
    linear.to(dtype)
    inputs = torch.randn(16, FEATURES, dtype=dtype)
    expected = linear(inputs)
    pack_linears(linear)
    with torch.inference_mode():
        torch.testing.assert_close(linear(inputs), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("vendor", "packed"), [("GenuineIntel", False), ("AuthenticAMD", True), (None, True)])
def test_weights_that_mkl_multiplies_faster_are_packed_elsewhere_only(
    tmp_path: Path, vendor: str | None, packed: bool
) -> None:
    cpu = tmp_path / "cpuinfo"
    if vendor is not None:
        cpu.write_text(f"processor : 0\nvendor_id : {vendor}\n")
    linear = nn.Linear(256, 768)
    pack_linears(linear, cpu)
    with torch.inference_mode(), torch.profiler.profile() as profile:
        linear(torch.randn(16, 256))
    assert any("mkldnn" in event.name for event in profile.events()) == packed
