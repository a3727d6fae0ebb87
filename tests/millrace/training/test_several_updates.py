"""Steps of several updates: their objectives, their report, and their repetition after a kill."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.one_by_one import response_logprobs
from support.training.update_batches import SEED, batch_of_groups, carrying_logprobs, make_trainer
from transformers import LlamaForCausalLM

from configs.training import TrainingConfig
from millrace.training.batch import Sample
from millrace.training.optimizer import plan_updates, planned_rate
from millrace.training.teacher import Teacher

MakeModel = Callable[..., LlamaForCausalLM]

TWICE: dict[str, Any] = {"minibatches": 2, "epochs": 2}


def by_hand(
    model: LlamaForCausalLM,
    samples: Sequence[Sample],
    loss: Callable[[Sample, torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Four updates of `model`; `loss` gets a sample, [L] log π with gradient, and [L] log π before all updates."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    with torch.no_grad():
        before = [carrying_logprobs(model, sample)[0] for sample in samples]
    for indices in plan_updates(samples, **TWICE, seed=SEED, policy_version=1):
        optimizer.zero_grad()
        tokens = sum(int(samples[index].loss_mask.sum()) for index in indices)
        parts = [loss(samples[at], carrying_logprobs(model, samples[at])[0], before[at]).sum() for at in indices]
        (torch.stack(parts).sum() / tokens).backward()
        optimizer.step()


def assert_same_weights(model: LlamaForCausalLM, expected: LlamaForCausalLM) -> None:
    for (name, parameter), other in zip(expected.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other, parameter, rtol=1e-3, atol=1e-4, msg=name)


def test_each_minibatch_takes_its_own_mean_over_its_own_tokens(make_model: MakeModel) -> None:
    trainer, samples, model = make_trainer(make_model(0), **TWICE), batch_of_groups(), make_model(0).train()
    report = trainer.step(samples)
    by_hand(model, samples, lambda sample, logprobs_L, _: -sample.advantage * logprobs_L)
    assert_same_weights(trainer.model, model)
    assert (report.updates, trainer.policy_version) == (4, 1)
    assert report.tokens == sum(int(sample.loss_mask.sum()) for sample in samples)


def test_recomputed_decoupled_ppo_clips_against_the_policy_before_the_first_update(make_model: MakeModel) -> None:
    low, high = 0.02, 0.03

    def decoupled(sample: Sample, logprobs_L: torch.Tensor, before_L: torch.Tensor) -> torch.Tensor:
        rollout_L = torch.from_numpy(sample.rollout_logprobs)[torch.from_numpy(sample.loss_mask).bool()]
        ratio_L = (logprobs_L - before_L).exp()
        clipped_L = ratio_L.clamp(1 - low, 1 + high)
        surrogate_L = torch.minimum(ratio_L * sample.advantage, clipped_L * sample.advantage)
        return -(before_L - rollout_L).exp() * surrogate_L

    samples, model = batch_of_groups(), make_model(0).train()
    parameters: dict[str, Any] = {"loss": {"name": "decoupled_ppo", "clip_low": low, "clip_high": high}}
    trainer = make_trainer(make_model(0), **parameters, **TWICE)
    report = trainer.step(samples)
    by_hand(model, samples, decoupled)
    assert_same_weights(trainer.model, model)
    assert report.clip_fraction > 0
    assert make_trainer(make_model(0), **parameters).step(samples).clip_fraction == 0


def test_what_is_stored_of_the_trainer_is_from_before_the_first_update(make_model: MakeModel) -> None:
    samples = batch_of_groups()
    single, several = (make_trainer(make_model(0), **parameters).step(samples) for parameters in ({}, TWICE))
    for name in ("trainer_logprobs", "trainer_entropies"):
        for ours, expected_R in zip(getattr(several, name), getattr(single, name), strict=True):
            np.testing.assert_array_equal(ours, expected_R)
    assert several.mismatch_kl == single.mismatch_kl
    assert several.importance_ratio_mean != single.importance_ratio_mean


def test_the_report_is_the_mean_of_the_updates_and_of_their_tokens(make_model: MakeModel) -> None:
    samples = batch_of_groups()
    together = make_trainer(make_model(0), epochs=2).step(samples)
    one_by_one = make_trainer(make_model(0))
    first, second = one_by_one.step(samples), one_by_one.step(samples)
    for name in ("loss", "grad_norm", "learning_rate", "importance_ratio_mean", "entropy", "weight_mean", "chi_square"):
        mean = (getattr(first, name) + getattr(second, name)) / 2
        assert getattr(together, name) == pytest.approx(mean, rel=1e-6), name
    assert together.importance_ratio_max == max(first.importance_ratio_max, second.importance_ratio_max)


@pytest.mark.parametrize("dies_at", [1, 2, 3, 4])
def test_a_step_that_dies_in_any_update_is_repeated_whole(
    make_model: MakeModel, dies_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters: dict[str, Any] = {**TWICE, "kl": {"coefficient": 0.1}, "schedule": {"ess_scaling": True}}
    undisturbed, dying, resumed = (
        make_trainer(make_model(seed), reference=make_model(1), **parameters) for seed in (0, 0, 2)
    )
    for trainer in (undisturbed, dying):
        trainer.step(batch_of_groups(seed=1))
    checkpoint, updated = dying.state(), []

    def die(training: TrainingConfig, step: int) -> float:
        updated.append(dying.state() != checkpoint)
        if len(updated) == dies_at:
            raise OSError("killed here")
        return planned_rate(training, step)

    monkeypatch.setattr("millrace.training.trainer.planned_rate", die)
    with pytest.raises(OSError):
        dying.step(batch_of_groups(seed=2))
    monkeypatch.undo()
    assert updated == [False] + [True] * (dies_at - 1)
    assert dying.policy_version == 1
    resumed.restore(1, checkpoint)
    assert resumed.step(batch_of_groups(seed=2)) == undisturbed.step(batch_of_groups(seed=2))
    assert resumed.state() == undisturbed.state()
    assert resumed.policy_version == 2


def test_the_learning_rate_in_force_follows_the_version_also_after_a_restore(make_model: MakeModel) -> None:
    schedule = {"decay": "linear", "warmup_steps": 1, "steps": 5, "final_share": 0.2}
    trainer, samples = make_trainer(make_model(0), schedule=schedule), batch_of_groups()
    rates = [trainer.step(samples).learning_rate for _ in range(3)]
    assert rates == pytest.approx([0.5e-2, 1e-2, 0.8e-2])
    resumed = make_trainer(make_model(1), schedule=schedule)
    resumed.restore(3, trainer.state())
    assert [resumed.step(samples).learning_rate for _ in range(3)] == pytest.approx([0.6e-2, 0.4e-2, 0.2e-2])


def test_stale_ratios_make_a_smaller_step_of_vcpos_size(make_model: MakeModel) -> None:
    samples = batch_of_groups()
    report = make_trainer(make_model(0), schedule={"ess_scaling": True}).step(samples)
    pairs = zip(report.trainer_logprobs, samples, strict=True)
    ratio = np.exp(np.concatenate([(new - sample.rollout_logprobs)[sample.loss_mask == 1] for new, sample in pairs]))
    ess = ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())
    assert report.learning_rate == pytest.approx(1e-2 * np.sqrt(ess), rel=1e-5)
    assert 0.1 < ess < 0.9
    fresh = [
        replace(sample, rollout_logprobs=new) for sample, new in zip(samples, report.trainer_logprobs, strict=True)
    ]
    assert make_trainer(make_model(0), schedule={"ess_scaling": True}).step(fresh).learning_rate == pytest.approx(1e-2)


@pytest.mark.parametrize("advantage", [0.0, 1.0])
def test_the_entropy_bonus_adds_the_gradient_of_the_entropy(make_model: MakeModel, advantage: float) -> None:
    samples = [replace(sample, advantage=advantage) for sample in batch_of_groups()]
    model = make_model(0).double().train()
    trainer = make_trainer(make_model(0).double(), entropy_coefficient=0.3)
    report = trainer.step(samples)
    pairs = [carrying_logprobs(model, sample) for sample in samples]
    entropy_L = torch.cat([entropy for _, entropy in pairs])
    (-(advantage * torch.cat([logprobs for logprobs, _ in pairs]) + 0.3 * entropy_L).mean()).backward()
    for (name, parameter), other in zip(model.named_parameters(), trainer.model.parameters(), strict=True):
        # Temperatures and rotary angles are float32.
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-5, atol=1e-7, msg=name)
    assert report.entropy == pytest.approx(entropy_L.mean().item())
    entropies = zip(report.trainer_entropies, samples, strict=True)
    stored_L = np.concatenate([entropy_R[sample.loss_mask > 0] for entropy_R, sample in entropies])
    np.testing.assert_allclose(stored_L, entropy_L.detach(), rtol=1e-6)


def test_adamw_has_the_configs_betas_and_epsilon(make_model: MakeModel) -> None:
    trainer = make_trainer(make_model(0), adamw={"beta1": 0.5, "beta2": 0.75, "epsilon": 1e-3})
    model, samples = make_model(0).train(), batch_of_groups()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.0)
    for _ in range(2):
        trainer.step(samples)
        optimizer.zero_grad()
        torch.cat([-sample.advantage * carrying_logprobs(model, sample)[0] for sample in samples]).mean().backward()
        optimizer.step()
    assert_same_weights(trainer.model, model)


def test_a_policy_that_follows_the_forward_kl_alone_comes_close_to_the_teacher(make_model: MakeModel) -> None:
    samples = [replace(sample, advantage=0.0) for sample in batch_of_groups()]
    vocabulary: int = make_model(1).config.vocab_size
    taught = [
        replace(sample, teacher_logprobs=of_sample.logprobs, teacher_top_tokens=of_sample.top_tokens.ravel(),
                teacher_top_logprobs=of_sample.top_logprobs.ravel())
        for sample, of_sample in zip(
            samples, Teacher(make_model(1), num_ids=vocabulary, max_tokens=99).teach(samples, vocabulary), strict=True
        )
    ]  # fmt: skip
    alone = {"teacher": "expert", "coefficient": 0.0, "top_k": vocabulary}
    trainer = make_trainer(make_model(0), distillation=alone, epochs=2)
    reports = [trainer.step(taught) for _ in range(15)]
    divergences = [
        torch.nn.functional.kl_div(policy_RV, teacher_RV, log_target=True, reduction="none").sum(dim=1)
        for policy_RV, teacher_RV in (
            [response_logprobs(make_model(seed), sample)[torch.from_numpy(sample.loss_mask).bool()] for seed in (0, 1)]
            for sample in samples
        )
    ]
    first = make_trainer(make_model(0), distillation=alone).step(taught)
    assert first.forward_kl_to_teacher == pytest.approx(torch.cat(divergences).mean().item(), rel=1e-5)
    assert reports[-1].forward_kl_to_teacher < first.forward_kl_to_teacher / 10
