"""The benchmark of the trainer, whole and tiny; the figures themselves are taken by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.trainer.__main__ import measure_steps
from benchmarks.trainer.steps import (
    TrainerCase,
    contenders,
    make_model,
    make_samples,
    model_flops,
    padded_runs,
    plain_pass,
)
from millrace.training.packing import microbatches
from millrace.training.policy import PackedPolicy

_CPU = torch.device("cpu")
_TINY = TrainerCase(
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=32,
    vocab_size=64,
    dtype="float32",
    num_samples=6,
    median_response=10,
    longest_response=40,
    max_tokens=200,
    checkpointing=False,
)


def test_a_whole_measurement_has_every_figure() -> None:
    steps = measure_steps(_TINY, _CPU, rounds=2)
    samples = make_samples(_TINY)
    assert steps["tokens"] == sum(sample.num_tokens for sample in samples)
    assert set(steps["seconds"]) == {"packed", "padded", "sorted"}
    assert all(len(values) == 2 and min(values) > 0 for values in steps["seconds"].values())
    assert steps["model_flops_utilisation"] is None
    assert steps["model_flops"] == model_flops(_TINY, samples)


def test_all_contenders_make_the_same_gradient() -> None:
    samples = make_samples(_TINY)
    model = make_model(_TINY, _CPU)
    plain_pass(model, samples, _TINY.max_tokens)
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    calls = contenders(_TINY, samples, _CPU)
    norm = calls["packed"]().grad_norm  # type: ignore[attr-defined]
    assert norm == pytest.approx(expected.norm().item(), rel=1e-4)
    plain_pass(model, sorted(samples, key=lambda sample: sample.num_tokens), 10**6)
    again = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-6)


@given(st.integers(1, 500))
def test_padded_rows_keep_to_the_budget_and_to_their_order(max_tokens: int) -> None:
    samples = make_samples(_TINY)
    runs = padded_runs(samples, max_tokens)
    assert [id(one) for run in runs for one in run] == [id(sample) for sample in samples]
    for run in runs:
        assert len(run) == 1 or len(run) * max(one.num_tokens for one in run) <= max_tokens


def test_the_models_operations_are_those_of_its_matrix_products_and_causal_attention() -> None:
    samples = make_samples(_TINY)
    (batch,) = microbatches(samples, 10**6)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        PackedPolicy(make_model(_TINY, _CPU))(batch)
    counts = counter.get_flop_counts()["Global"]
    products = sum(
        flops for operation, flops in counts.items() if operation in (torch.ops.aten.mm, torch.ops.aten.addmm)
    )
    squares = sum((sample.num_tokens - 1) ** 2 for sample in samples)
    assert model_flops(_TINY, samples) == 3 * products + 6 * 2 * 16 * squares
