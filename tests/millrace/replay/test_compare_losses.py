"""Losses compared on one batch: their numbers follow the closed forms, and the original does not change."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.engines.one_by_one import response_logprobs, taken
from support.streams.scored_groups import scored_group
from transformers import LlamaForCausalLM

from configs.schema import RunConfig
from configs.training import TrainingConfig
from millrace.replay.compare import compare_losses
from millrace.replay.results import Row
from millrace.rollouts.scored_group import ScoredGroup
from millrace.training.batch import Sample
from millrace.training.losses.factory import make_loss
from millrace.training.samples import samples_of
from millrace.training.trainer import Trainer

MakeModel = Callable[..., LlamaForCausalLM]

RHO, LOW, HIGH = 2.0, 0.2, 0.2
CONFIG = RunConfig.model_validate(
    {
        "training": {
            "max_steps": 1,
            "loss": {"name": "aipo", "max_importance_ratio": RHO},
            "learning_rate": 1e-3,
            "max_grad_norm": 0.5,
        }
    }
)
LOSSES = ("aipo", "reinforce", "ppo_clip", "cispo")
"""Losses with a closed form in this file."""
STALE = 8
"""The oldest rollouts of these tests, policy versions."""


def policy(make_model: MakeModel, versions: int = 0) -> LlamaForCausalLM:
    """The model of seed 0, with all weights moved a little per version."""
    model = make_model(0)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.015 * versions)
    return model


def samples_in(groups: Sequence[ScoredGroup]) -> list[Sample]:
    return samples_of(groups, TrainingConfig(max_steps=1), 0)


def batch(behaviour: LlamaForCausalLM, seed: int = 0, rewards: Sequence[float] | None = None) -> list[ScoredGroup]:
    """Six groups of four, of tokens drawn at random, with their log-probabilities under `behaviour`."""
    random = np.random.default_rng(seed)
    groups = []
    for number in range(6):
        responses = [random.integers(2, 15, size=random.integers(1, 7)).astype(np.int32) for _ in range(4)]
        group = replace(
            scored_group(number, [[0] * len(tokens) for tokens in responses], rewards or random.integers(0, 3, 4) / 2),
            prompt_tokens=[np.array([1, 3 + number, 4], dtype=np.int32)] * 4,
            response_tokens=responses,
            temperature=0.9,
        )
        with torch.no_grad():
            logprobs = [taken(response_logprobs(behaviour, s), s).numpy() for s in samples_in([group])]
        groups.append(replace(group, rollout_logprobs=logprobs))
    return groups


def on_policy(trainer: Trainer, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """The groups, with the very log π that a step of `trainer` finds: every ratio is exactly 1."""
    samples = samples_in(groups)
    logprobs = iter(trainer_of(deepcopy(trainer.model), trainer.loss.name).step(samples).trainer_logprobs)
    return [replace(group, rollout_logprobs=[next(logprobs) for _ in group.rewards]) for group in groups]


def trainer_of(model: LlamaForCausalLM, loss: str = "aipo") -> Trainer:
    training = CONFIG.training.with_loss(loss)
    return Trainer(model, training)


def rows_by_loss(original: Trainer, groups: Sequence[ScoredGroup], names: Sequence[str] = LOSSES) -> dict[str, Row]:
    """The comparison of the losses on `groups`, at the weights of `original`."""
    copies = [trainer_of(deepcopy(original.model), name) for name in names]
    return {row["loss"]: row for row in compare_losses(original, copies, samples_in(groups))}


def test_losses_are_compared_in_bfloat16_too(make_model: MakeModel) -> None:
    training = CONFIG.training.model_copy(update={"compute_dtype": "bfloat16"})
    original, same, other = (Trainer(policy(make_model), training) for _ in range(3))
    other.set_loss(make_loss(training, "reinforce"))
    row, _ = compare_losses(original, [same, other], samples_in(batch(policy(make_model, STALE))))
    assert row["cosine_aipo"] == pytest.approx(1.0)
    assert 0.5 < row["cosine_reinforce"] < 0.9999


def own_attention(trainer: Trainer, make_model: MakeModel) -> LlamaForCausalLM:
    """A trainer's policy with its own attention again."""
    model = make_model(0)
    model.load_state_dict(trainer.model.state_dict())
    return model


def closed_form_weights(
    name: str, ratio: npt.NDArray[np.float64], advantage: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The factors of A · ∇ log π, by formula."""
    if name == "aipo":
        return np.minimum(ratio, RHO)
    if name == "cispo":
        return np.minimum(ratio, 1 + HIGH)
    if name == "reinforce":
        return np.ones_like(ratio)
    let_go = np.where(advantage > 0, ratio > 1 + HIGH, ratio < 1 - LOW) & (advantage != 0)
    return np.where(let_go, 0.0, ratio)


def by_hand(name: str, model: LlamaForCausalLM, groups: Sequence[ScoredGroup]) -> tuple[Row, torch.Tensor]:
    """The numbers of one loss on a batch and its gradient, from single forward passes."""
    samples = samples_in(groups)
    logprobs = [taken(response_logprobs(model, sample), sample) for sample in samples]
    logprobs_N = torch.cat(logprobs)
    advantage = np.concatenate([np.full(len(sample.response_tokens), sample.advantage) for sample in samples])
    rollout = np.concatenate([sample.rollout_logprobs for sample in samples]).astype(np.float64)
    ratio = np.exp(logprobs_N.detach().double().numpy() - rollout)
    weight = closed_form_weights(name, ratio, advantage)
    (-torch.from_numpy(weight * advantage) * logprobs_N).mean().backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    model.zero_grad()
    bounded = {"aipo": ratio > RHO, "cispo": ratio > 1 + HIGH, "reinforce": np.zeros_like(ratio, dtype=bool)}
    return {
        "grad_norm": gradient.norm().item(),
        "clip_fraction": bounded.get(name, weight == 0).mean(),
        "effective_sample_size": weight.sum() ** 2 / (len(weight) * (weight**2).sum()),
        "weight_mean": weight.mean(),
        "weight_max": weight.max(),
        "importance_ratio_mean": ratio.mean(),
        "importance_ratio_max": ratio.max(),
        "tokens": len(ratio),
    }, gradient


def test_on_policy_all_losses_have_the_same_gradient(make_model: MakeModel) -> None:
    original = trainer_of(policy(make_model))
    rows = rows_by_loss(original, on_policy(original, batch(policy(make_model))))
    for name, row in rows.items():
        assert (row["importance_ratio_max"], row["weight_max"], row["weight_mean"]) == (1.0, 1.0, 1.0), name
        assert (row["clip_fraction"], row["effective_sample_size"], row["mismatch_kl"]) == (0.0, 1.0, 0.0), name
        assert row["grad_norm"] == rows["reinforce"]["grad_norm"] > 0, name
        assert row["implied_kl"] == rows["reinforce"]["implied_kl"] > 0, name
        for other in LOSSES:
            assert row[f"cosine_{other}"] == pytest.approx(1.0, abs=1e-12), (name, other)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 3, STALE])
def test_numbers_and_gradients_follow_the_closed_forms(make_model: MakeModel, staleness: int) -> None:
    groups = batch(policy(make_model, staleness))
    rows = rows_by_loss(trainer_of(policy(make_model)), groups)
    hand = {name: by_hand(name, policy(make_model), groups) for name in LOSSES}
    for name, row in rows.items():
        numbers, gradient = hand[name]
        for number, value in numbers.items():
            assert row[number] == pytest.approx(value, rel=2e-4, abs=1e-9), (name, number)
        for other, (_, other_gradient) in hand.items():
            cosine = torch.cosine_similarity(gradient.double(), other_gradient.double(), dim=0).item()
            assert row[f"cosine_{other}"] == pytest.approx(cosine, abs=1e-4), (name, other)
    assert rows["aipo"]["weight_max"] <= RHO
    assert rows["cispo"]["weight_max"] <= np.float32(1 + HIGH)


@pytest.mark.parametrize("name", LOSSES)
def test_the_implied_kl_is_over_the_whole_vocabulary(make_model: MakeModel, name: str) -> None:
    groups = batch(policy(make_model, 4))
    row = rows_by_loss(trainer_of(policy(make_model)), groups)[name]
    samples = samples_in(groups)
    original, trainer = policy(make_model), trainer_of(policy(make_model), name)
    trainer.step(samples)
    moved, kl = own_attention(trainer, make_model), []
    with torch.no_grad():
        for sample in samples:
            old, new = (response_logprobs(model, sample).double() for model in (original, moved))
            kl += (old.exp() * (old - new)).sum(dim=-1).tolist()
    assert row["implied_kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-3)


def test_a_comparison_does_not_change_the_original(make_model: MakeModel) -> None:
    original, alone = trainer_of(policy(make_model)), trainer_of(policy(make_model))
    for seed in range(3):
        groups = batch(policy(make_model, 4), seed)
        rows_by_loss(original, groups[:2])
        reports = [trainer.step(samples_in(groups)) for trainer in (original, alone)]
        logprobs = zip(*(report.trainer_logprobs for report in reports), strict=True)
        assert all(np.array_equal(a, b) for a, b in logprobs)
    assert original.state() == alone.state()


def test_a_gradient_of_zero_has_no_cosine(make_model: MakeModel) -> None:
    # All responses alike: every advantage is 0.
    rows = rows_by_loss(trainer_of(policy(make_model)), batch(policy(make_model, 4), rewards=[1.0, 1.0, 1.0, 1.0]))
    assert [row["grad_norm"] for row in rows.values()] == [0.0] * len(LOSSES)
    assert {row[f"cosine_{other}"] for row in rows.values() for other in LOSSES} == {None}
