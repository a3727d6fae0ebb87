"""Compiled and checkpointed decoder layers: the steps of plain ones, without a new graph for each microbatch."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from support.training.sharded_trainers import CASES, Case, make_trainer, samples
from torch._dynamo.utils import counters

from configs.losses import KlConfig
from millrace.training.parallel.ranks import ALONE


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing is compiled yet, and no process group outlives the test."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch._functorch.config.aggressive_recomputation = False
    if dist.is_initialized():
        dist.destroy_process_group()


def with_settings(name: str, **settings: Any) -> Case:
    case = CASES[name]
    return replace(case, training=case.training.model_copy(update=settings))


def steps(case: Case, count: int = 3) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The measures of each step, and the weights after the last."""
    trainer = make_trainer(case, ALONE, case.compute_dtype)
    measured = [
        trainer.step(samples(7, seed=seed, shared_prompt=case.shared_prompt)).measured() for seed in range(count)
    ]
    return measured, trainer.weights()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("checkpointing", [True, "selective"])
@pytest.mark.parametrize("name", ["llama aipo", "llama aipo bfloat16", "qwen3_moe aipo"])
def test_activation_checkpointing_changes_no_bit(name: str, checkpointing: object) -> None:
    expected, weights = steps(with_settings(name, activation_checkpointing=False))
    measured, weights_again = steps(with_settings(name, activation_checkpointing=checkpointing))
    assert measured == expected
    for key, weight in weights.items():
        assert torch.equal(weights_again[key], weight), key


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_without_a_compiler_the_steps_are_those_of_plain_layers(
    monkeypatch: pytest.MonkeyPatch, checkpointing: object
) -> None:
    expected, weights = steps(with_settings("llama aipo", activation_checkpointing=checkpointing))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    case = with_settings("llama aipo", activation_checkpointing=checkpointing, compile=True)
    assert not make_trainer(case, ALONE, None).compiles
    measured, weights_again = steps(case)
    assert counters["frames"]["total"] == 0, "nothing went to the compiler"
    assert measured == expected
    assert all(torch.equal(weights_again[name], weight) for name, weight in weights.items())


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_compiled_layers_make_the_steps_of_plain_ones(checkpointing: object) -> None:
    expected, _ = steps(with_settings("llama aipo", activation_checkpointing=checkpointing))
    measured, _ = steps(with_settings("llama aipo", activation_checkpointing=checkpointing, compile=True))
    assert counters["frames"]["ok"] > 0
    for result, plain in zip(measured, expected, strict=True):
        assert result == pytest.approx(plain, rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("llama aipo", {"packed_attention"}),
        ("gemma3 one prompt", {"packed_attention"}),
        ("qwen3_moe aipo", {"packed_attention", "Qwen3MoeSparseMoeBlock.forward"}),
    ],
)
def test_only_attention_and_experts_are_left_out_of_the_graphs(
    monkeypatch: pytest.MonkeyPatch, name: str, left_out: set[str]
) -> None:
    # The graphs are those of every backend; this one does not translate them.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    case = with_settings(name, compile=True)
    steps(case, 1)
    reasons = set(counters["graph_break"])
    assert {function for function in left_out if any(f"<function {function} " in reason for reason in reasons)} == (
        left_out
    )
    assert len(reasons) == len(left_out)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("kl_coefficient", "entropy_coefficient"),
    [(0.0, 0.0), (0.1, 0.1), *(pytest.param(*each, marks=pytest.mark.extended) for each in [(0.0, 0.1), (0.1, 0.0)])],
)
def test_after_a_warm_up_no_step_compiles(
    monkeypatch: pytest.MonkeyPatch, kl_coefficient: float, entropy_coefficient: float
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    settings = {"kl": KlConfig(coefficient=kl_coefficient), "entropy_coefficient": entropy_coefficient, "epochs": 2}
    trainer = make_trainer(with_settings("llama aipo", compile=True, **settings), ALONE, None)
    start, random = trainer.state(), torch.random.get_rng_state()
    trainer.warm_up()
    assert trainer.state() == start
    assert torch.equal(torch.random.get_rng_state(), random)
    compiled = counters["frames"]["total"]
    assert compiled > 0
    # Truncated sampling, which the samples have by default, would be compiled in the first step with such a response.
    none = np.zeros(0, np.int32)
    for seed in range(3):
        trainer.step([replace(sample, kept_tokens=none, kept_counts=none) for sample in samples(7, seed=seed)])
    assert counters["frames"]["total"] == compiled


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
def test_microbatches_of_other_lengths_use_the_same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    trainer = make_trainer(with_settings("llama aipo", compile=True), ALONE, None)
    trainer.step(samples(7, seed=0))
    compiled = counters["frames"]["total"]
    for seed in range(1, 5):
        trainer.step(samples(6, seed=seed))
    assert counters["frames"]["total"] == compiled
