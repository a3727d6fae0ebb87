"""The benchmark of the trainer measures what it says: whole and tiny, the figures themselves are taken by hand."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.trainer.__main__ import measure_memory, measure_steps, targets_met
from benchmarks.trainer.sharing import CASES as GROUPS
from benchmarks.trainer.sharing import make_groups, measure_sharing
from benchmarks.trainer.sharing import targets_met as sharing_targets
from benchmarks.trainer.steps import (
    CASES,
    Case,
    contenders,
    make_model,
    make_samples,
    model_flops,
    padded_runs,
    plain_pass,
)
from millrace.training.logprobs import CHUNK_ELEMENTS
from millrace.training.packing import microbatches
from millrace.training.policy import PackedPolicy

_CPU = torch.device("cpu")
_TINY = Case(
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
    found = measure_steps(_TINY, _CPU, rounds=2)
    samples = make_samples(_TINY)
    assert found["tokens"] == sum(sample.num_tokens for sample in samples)
    assert set(found["seconds"]) == {"packed", "padded", "sorted"}
    assert all(len(values) == 2 and min(values) > 0 for values in found["seconds"].values())
    assert found["model_flops_utilisation"] is None
    assert found["model_flops"] == model_flops(_TINY, samples)


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
    assert [id(one) for run in runs for one in run] == [id(one) for one in samples]
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
    squares = sum(sample.num_tokens**2 for sample in samples)
    assert model_flops(_TINY, samples) == 3 * products + 6 * 2 * 16 * squares


def test_the_large_model_has_about_a_billion_parameters() -> None:
    model = make_model(CASES["cuda"], torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(1.24e9, rel=0.01)


@pytest.mark.extended
def test_the_naive_peak_is_that_of_whole_matrices_and_the_chunked_one_of_a_few_chunks() -> None:
    found = measure_memory("cpu", tokens=1024, width=8, dtype="float32", vocab=131_072)
    matrix, chunk = 4 * 1024 * 131_072, 4 * CHUNK_ELEMENTS["cpu"]
    assert found["peak_bytes"]["naive"] > 2 * matrix
    assert chunk < found["peak_bytes"]["chunked"] < 4 * chunk
    assert found["share"] == found["peak_bytes"]["chunked"] / found["peak_bytes"]["naive"]


@pytest.mark.parametrize(("speedup", "share", "met"), [(1.5, 0.35, [True, True]), (1.4, 0.36, [False, False])])
def test_targets_are_held_against_the_figures(speedup: float, share: float, met: list[bool]) -> None:
    assert list(targets_met({"step": {"speedup": speedup}, "memory": {"share": share}}).values()) == met


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_the_device_asked_for_it_says_so_in_a_sentence() -> None:
    command = [sys.executable, "-m", "benchmarks.trainer", "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip() == "--device cuda needs a CUDA device, but torch sees none"


@pytest.mark.extended
def test_groups_are_stepped_with_and_without_sharing_their_prompt_and_both_peaks_are_measured() -> None:
    case = replace(GROUPS[0], num_groups=2, prompt=40, response=4, model=replace(GROUPS[0].model, num_layers=1))
    samples = make_groups(case)
    assert len({sample.prompt_tokens.tobytes() for sample in samples}) == 2
    assert len(samples) == 16
    (found,) = measure_sharing(rounds=1, cases=[case])
    assert found["ratio"] == found["seconds"]["unshared"][0] / found["seconds"]["shared"][0]
    assert min(found["peak_bytes"].values()) > 0
    assert sharing_targets([{**found, "ratio": 2.3}, {**found, "name": "slow", "ratio": 2.2}]) == {
        "shared over unshared at 40 + 4 tokens × 8": True,
        "shared over unshared at slow": False,
    }
