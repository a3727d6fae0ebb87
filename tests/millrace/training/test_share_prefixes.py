"""Prompts computed once for a group: log π and gradients are those of each sequence alone, whatever shares what."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training.families import CASES, WINDOW
from support.training.samples import make_sample
from transformers import PreTrainedModel

from configs.training import TrainingConfig
from millrace.training.batch import Sample
from millrace.training.packing import microbatches
from millrace.training.policy import PackedPolicy
from millrace.training.trainer import Trainer

Shape = tuple[int, Sequence[int]]
"""Tokens of a prompt, and of each of its responses."""
SHAPES: list[Shape] = [(20, [5, 1, 12, 5, 2]), (3 * WINDOW, [9, 9]), (2, [4, 4]), (30, [3, 40, 3])]


def groups(shapes: Sequence[Shape], vocab: int = 40, seed: int = 0) -> list[Sample]:
    """Samples of several prompts, all after the same system prompt; some responses begin alike."""
    random = np.random.default_rng(seed)
    system, start = random.integers(3, vocab, 6), random.integers(3, vocab, 4)
    made = []
    for prompt, responses in shapes:
        tokens = np.concatenate([system, random.integers(3, vocab, prompt)]).astype(np.int32)
        for number, length in enumerate(responses):
            own = random.integers(3, vocab, length)
            response = np.concatenate([start, own])[:length] if number % 2 else own
            made.append(
                make_sample(
                    tokens,
                    response,
                    rollout_logprobs=-2,
                    loss_mask=np.arange(length) % 5 != 3,
                    temperature=1.0 + 0.25 * (number % 2),
                    advantage=float(random.normal()),
                )
            )
    return made


def log_pi(model: PreTrainedModel, samples: Sequence[Sample], max_tokens: int, share: bool) -> torch.Tensor:
    """[N] of the whole batch; the gradient of a weighted sum of it is left in the model."""
    policy = PackedPolicy(model)
    logprobs = torch.zeros(sum(len(item.response_tokens) for item in samples), dtype=torch.float64)
    pulls = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for batch in microbatches(samples, max_tokens, share_prefixes=share):
        logprobs_N = policy(batch)[0]
        (logprobs_N * pulls[batch.in_batch_N]).sum().backward()
        logprobs[batch.in_batch_N] = logprobs_N.detach().double()
    return logprobs


def assert_same(model: PreTrainedModel, samples: Sequence[Sample], max_tokens: int, tolerance: float) -> None:
    alone, shared = deepcopy(model), deepcopy(model)
    expected = log_pi(alone, samples, max_tokens, share=False)
    shared_logprobs = log_pi(shared, samples, max_tokens, share=True)
    torch.testing.assert_close(shared_logprobs, expected, rtol=0, atol=10 * tolerance)
    for (name, parameter), other in zip(alone.named_parameters(), shared.parameters(), strict=True):
        assert parameter.grad is not None
        largest = parameter.grad.abs().max().item()
        torch.testing.assert_close(other.grad, parameter.grad, rtol=0, atol=tolerance * max(1.0, largest), msg=name)


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """Its norms too, which transformers computes in float32."""
    for name, norm in list(model.named_modules()):
        if name.endswith("norm"):
            exact = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)
            exact.weight = norm.weight
            model.set_submodule(name, exact)
    return model.double()


def num_positions(samples: Sequence[Sample], share: bool) -> int:
    return sum(len(item.input_ids_S) for item in microbatches(samples, 10_000, share_prefixes=share))


def test_a_batch_of_groups_takes_fewer_positions() -> None:
    samples = groups(SHAPES)
    assert num_positions(samples, share=True) < 0.7 * num_positions(samples, share=False)


@pytest.mark.parametrize("family", CASES)
def test_log_pi_and_gradients_of_every_family_are_those_without_sharing(family: str) -> None:
    assert_same(CASES[family].model(seed=0), groups(SHAPES), max_tokens=120, tolerance=1e-5)


@settings(deadline=None, max_examples=25)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1, max_size=8)), min_size=1, max_size=4
    ),
    max_tokens=st.integers(20, 300),
    family=st.sampled_from(["llama", "mistral", "qwen3", "qwen2 windows"]),
)
def test_whatever_the_groups_are_gradients_are_exact(shapes: list[Shape], max_tokens: int, family: str) -> None:
    assert_same(in_float64(CASES[family].model(seed=0)), groups(shapes), max_tokens, tolerance=1e-12)


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1, max_size=8)), min_size=1, max_size=6
    ),
    max_tokens=st.integers(8, 200),
    num_ranks=st.integers(1, 5),
)
def test_every_sample_is_in_one_microbatch_within_the_budget(
    shapes: list[Shape], max_tokens: int, num_ranks: int
) -> None:
    samples = groups(shapes)
    batches = microbatches(samples, max_tokens, num_ranks)
    assert sorted(place for batch in batches for place in batch.indices) == list(range(len(samples)))
    assert len(batches) % num_ranks == 0
    for batch in batches:
        assert len(batch.input_ids_S) <= max_tokens or len(batch.indices) == 1
        for n, place in zip(batch.predicts_N.tolist(), batch.response_N.tolist(), strict=True):
            assert batch.positions_S[n] >= len(samples[batch.indices[place]].prompt_tokens) - 1


def test_few_groups_are_divided_among_many_ranks() -> None:
    # One group of eight: each of four ranks computes the prompt, and no rank all responses.
    samples = groups([(50, [40] * 8)])
    sizes = [len(batch.input_ids_S) for batch in microbatches(samples, 10_000, num_ranks=4)]
    assert len(sizes) == 4
    assert max(sizes) < 56 + 4 * 40


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": True},
        {"kl": {"coefficient": 0.1}},
        {"lora": {"rank": 2}},
        {"aggregation": "sequence_mean", "loss": "gspo"},
    ],
    ids=["activation checkpointing", "reference policy", "adapters", "ratios of responses"],
)
def test_a_step_is_the_same_without_sharing(settings: dict[str, object]) -> None:
    model = in_float64(CASES["llama"].model(seed=0))
    reports, weights = [], []
    for share in (False, True):
        training = TrainingConfig.model_validate(
            {"max_steps": 1, "max_tokens_per_microbatch": 150, "share_prefixes": share, "learning_rate": 1e-3}
            | settings
        )
        torch.manual_seed(0)
        reference = deepcopy(model) if training.kl.coefficient else None
        trainer = Trainer(deepcopy(model), training, reference=reference)
        samples = groups(SHAPES)
        reports += [trainer.step([replace(item, advantage=1.0 + number % 3) for number, item in enumerate(samples)])]
        weights += [trainer.weights()]
    alone, shared = reports
    for name, value in alone.measured().items():
        assert shared.measured()[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    for name, tensor in weights[0].items():
        # AdamW's first step divides by the gradient's size, so that rounding shows where a gradient is 0.
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=1e-6, msg=name)
