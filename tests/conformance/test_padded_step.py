"""A whole step, packed and in microbatches, against padded rows through plain transformers, in float64.

samples ─┬─► Trainer.step: packed microbatches, scaled losses, summed       ─► gradient of each weight
         └─► rows padded to the longest, sdpa attention, whole log-softmax ─► paper's objective ─► gradient
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training import papers
from support.training.papers import AGGREGATIONS, Rows, Terms
from support.training.samples import make_sample
from transformers import LlamaConfig, LlamaForCausalLM

from configs.training import TrainingConfig
from millrace.training.batch import Sample
from millrace.training.trainer import Trainer

VOCAB = 11
MOST_TOKENS = 6
CASES: list[tuple[dict[str, Any], Terms, str]] = [
    ({"loss": "ppo_clip"}, papers.ppo_clip(0.2, 0.2), "token_mean"),
    ({"loss": {"name": "ppo_clip", "dual_clip": 2}}, papers.dual_clip(0.2, 0.2, 2), "sequence_mean"),
    (
        {"loss": {"name": "decoupled_ppo", "proximal": "interpolated"}},
        papers.decoupled_ppo(0.2, 0.2, interpolated=True),
        "token_mean",
    ),
    ({"loss": {"name": "gspo", "clip_low": 0.1, "clip_high": 0.2}}, papers.gspo(0.1, 0.2), "sequence_mean"),
    ({"loss": "sequence_mask"}, papers.sequence_mask(0.5, 2), "constant"),
    ({"loss": "topr"}, papers.topr, "constant"),
]


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        attn_implementation="sdpa",
    )
    made: LlamaForCausalLM = LlamaForCausalLM(shape).double()
    return made


def draw_samples(seed: int) -> list[Sample]:
    """Responses of 1 to 6 tokens; a third of their tokens are masked, in some all of them."""
    random = np.random.default_rng(seed)
    samples = []
    for place in range(int(random.integers(1, 7))):
        length = int(random.integers(1, MOST_TOKENS + 1))
        mask = random.random(length) < 0.67
        mask[0] |= place == 0
        samples.append(
            make_sample(
                random.integers(0, VOCAB, random.integers(1, 9)),
                random.integers(0, VOCAB, length),
                rollout_logprobs=-np.log(VOCAB) + random.normal(0, 0.4, length),
                loss_mask=mask,
                temperature=float(random.choice([0.5, 1.0, 2.0])),
                # Exact in single precision, in which microbatches hold them.
                advantage=float(random.choice([-1.5, -0.25, 0.0, 1.0])),
                staleness=int(random.integers(0, 4)),
                max_new_tokens=MOST_TOKENS,
            )
        )
    return samples


def padded_logprobs(policy: LlamaForCausalLM, samples: Sequence[Sample]) -> torch.Tensor:
    """[B, T] log π of the responses' tokens."""
    input_ids_BL = torch.zeros(len(samples), max(sample.num_tokens for sample in samples), dtype=torch.int64)
    mask_BL = torch.zeros_like(input_ids_BL)
    for b, sample in enumerate(samples):
        tokens = np.concatenate([sample.prompt_tokens, sample.response_tokens])
        input_ids_BL[b, : len(tokens)] = torch.from_numpy(tokens)
        mask_BL[b, : len(tokens)] = 1
    logits_BLV = policy(input_ids=input_ids_BL, attention_mask=mask_BL).logits
    temperatures_B = torch.tensor([sample.temperature for sample in samples], dtype=torch.float64)
    logprobs_BLV = torch.log_softmax(logits_BLV / temperatures_B[:, None, None], dim=-1)
    rows = []
    for b, sample in enumerate(samples):
        first, targets_T = len(sample.prompt_tokens) - 1, torch.from_numpy(sample.response_tokens).long()
        of_response_T = logprobs_BLV[b, first : first + len(targets_T)].gather(1, targets_T[:, None])[:, 0]
        rows.append(torch.nn.functional.pad(of_response_T, (0, MOST_TOKENS - len(targets_T))))
    return torch.stack(rows)


def padded(values: Sequence[np.ndarray[Any, Any]]) -> torch.Tensor:
    return torch.from_numpy(np.stack([np.pad(value, (0, MOST_TOKENS - len(value))) for value in values]))


def published_gradient(samples: Sequence[Sample], terms: Terms, aggregation: str) -> dict[str, torch.Tensor]:
    policy = model()
    rows = Rows(
        pi_BT=padded_logprobs(policy, samples),
        mu_BT=padded([sample.rollout_logprobs for sample in samples]).double(),
        mask_BT=padded([sample.loss_mask for sample in samples]).bool(),
        advantages_B=torch.tensor([sample.advantage for sample in samples], dtype=torch.float64),
        staleness_B=torch.tensor([sample.staleness for sample in samples]),
    )
    torch.autograd.backward(-AGGREGATIONS[aggregation](terms(rows), rows.mask_BT, MOST_TOKENS))
    return {name: one.grad for name, one in policy.named_parameters() if one.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(("section", "terms", "aggregation"), CASES)
@settings(max_examples=8)
@given(seed=st.integers(0, 10_000), max_tokens=st.integers(1, 60))
def test_the_gradient_of_a_step_is_that_of_the_published_objective_on_padded_rows(
    section: dict[str, Any], terms: Terms, aggregation: str, seed: int, max_tokens: int
) -> None:
    samples = draw_samples(seed)
    values = {"max_steps": 1, "max_grad_norm": 1e9, "max_tokens_per_microbatch": max_tokens, "aggregation": aggregation}
    trainer = Trainer(model(), TrainingConfig.model_validate({**values, **section}))
    trainer.step(samples)
    expected = published_gradient(samples, terms, aggregation)
    for name, parameter in trainer.model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # Mostly equal to 1e-15. transformers rounds in its norms to float32, where the last bit may fall either way.
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-7)
