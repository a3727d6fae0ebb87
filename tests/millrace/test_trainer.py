"""The trainer: one step is the same however it is cut up, means what it reports, and survives a restart bit by bit."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from millrace.batch import Sample
from millrace.engines.transformers import TransformersEngine
from millrace.errors import TrainingDiverged
from millrace.losses.aipo import Aipo
from millrace.losses.base import Loss
from millrace.losses.ppo_clip import PpoClip
from millrace.trainer import WEIGHTS_FILE, Trainer, load_weights
from millrace.types import Sampling
from storage.checkpoints import CheckpointWriter
from storage.memory import MemoryStore

MakeModel = Callable[..., LlamaForCausalLM]

RHO = 2.0
AIPO = Aipo(max_importance_ratio=RHO)


def make_trainer(
    model: LlamaForCausalLM,
    *,
    loss: Loss = AIPO,
    max_tokens: int = 1000,
    learning_rate: float = 1e-3,
    max_grad_norm: float = 1e9,
) -> Trainer:
    return Trainer(
        model,
        loss=loss,
        learning_rate=learning_rate,
        weight_decay=0.01,
        max_grad_norm=max_grad_norm,
        max_tokens_per_microbatch=max_tokens,
    )


def sample(
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    rollout_logprobs: Sequence[float] | None = None,
    loss_mask: Sequence[int] | None = None,
    temperature: float = 1.0,
    advantage: float = 1.0,
) -> Sample:
    return Sample(
        prompt_tokens=np.array(prompt, dtype=np.int32),
        response_tokens=np.array(response, dtype=np.int32),
        rollout_logprobs=np.array(rollout_logprobs or [-2.0] * len(response), dtype=np.float32),
        loss_mask=np.array(loss_mask or [1] * len(response), dtype=np.uint8),
        temperature=temperature,
        advantage=advantage,
    )


def logprobs(model: LlamaForCausalLM, of: Sample) -> torch.Tensor:
    """[R] log π of the sample's response after its temperature, computed alone and without padding."""
    tokens = torch.tensor([*of.prompt_tokens, *of.response_tokens])
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, len(of.prompt_tokens) - 1 : -1]
    return torch.log_softmax(logits / of.temperature, dim=-1).gather(1, tokens[len(of.prompt_tokens) :, None])[:, 0]


SAMPLES = [
    sample([1, 3, 4], [5, 6, 2], advantage=0.5),
    sample([1, 7], [8, 2], advantage=-1.0, temperature=0.7),
    sample([1, 9, 10, 11], [12, 13, 14, 3, 2], advantage=1.5, loss_mask=[1, 0, 1, 1, 1]),
    sample([1, 5, 6], [2], advantage=-0.25, temperature=1.3),
    sample([1, 3], [4, 5, 6, 7, 8, 9], advantage=1.0),
]


@pytest.mark.parametrize("max_tokens", [1, 12, 20, 30])
def test_any_split_into_microbatches_gives_the_same_gradient_weights_and_report(
    make_model: MakeModel, max_tokens: int
) -> None:
    whole, cut = make_trainer(make_model(0)), make_trainer(make_model(0), max_tokens=max_tokens)
    expected, report = whole.step(SAMPLES), cut.step(SAMPLES)
    for (name, parameter), other in zip(whole.model.named_parameters(), cut.model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=0, atol=1e-6, msg=name)
        torch.testing.assert_close(other, parameter, rtol=0, atol=1e-6, msg=name)
    for name in ("loss", "grad_norm", "importance_ratio_mean", "effective_sample_size", "mismatch_kl", "tokens"):
        assert getattr(report, name) == pytest.approx(getattr(expected, name), rel=1e-5), name


def test_the_gradient_is_that_of_the_token_mean_written_out_by_hand(make_model: MakeModel) -> None:
    trainer, model = make_trainer(make_model(0), max_tokens=20), make_model(0)
    trainer.step(SAMPLES)
    loss = torch.zeros(())
    for each in SAMPLES:
        tokens = torch.tensor([*each.prompt_tokens, *each.response_tokens])
        logits = model(input_ids=tokens[None]).logits[0, len(each.prompt_tokens) - 1 : -1] / each.temperature
        trainer_logprobs = logits.log_softmax(-1)[range(len(logits)), tokens[len(each.prompt_tokens) :]]
        ratio = (trainer_logprobs.detach() - torch.from_numpy(each.rollout_logprobs)).exp()
        per_token = -ratio.clamp(max=RHO) * each.advantage * trainer_logprobs
        loss = loss + (per_token * torch.from_numpy(each.loss_mask)).sum()
    torch.autograd.backward(loss / sum(int(each.loss_mask.sum()) for each in SAMPLES))
    for (name, parameter), other in zip(model.named_parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=0, atol=1e-6, msg=name)


def test_padding_does_not_change_log_probabilities(make_model: MakeModel) -> None:
    short, long = sample([1, 3], [4, 5]), sample([1, *range(3, 15)], [3] * 20, advantage=0.0)
    alone = make_trainer(make_model(0)).step([short])
    padded = make_trainer(make_model(0)).step([short, replace(long, loss_mask=np.zeros(20, dtype=np.uint8))])
    assert padded.tokens == alone.tokens == 2
    assert padded.mismatch_kl == pytest.approx(alone.mismatch_kl, abs=1e-5)
    assert padded.loss == pytest.approx(alone.loss, rel=1e-5)
    expected = (torch.from_numpy(short.rollout_logprobs) - logprobs(make_model(0), short)).mean().item()
    assert alone.mismatch_kl == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_temperature_divides_the_logits(make_model: MakeModel, temperature: float) -> None:
    hot = sample([1, 3], [4, 5, 6], temperature=temperature)
    expected = (torch.from_numpy(hot.rollout_logprobs) - logprobs(make_model(0), hot)).mean().item()
    assert make_trainer(make_model(0)).step([hot]).mismatch_kl == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_trainer_and_generator_agree_on_what_an_on_policy_token_is(
    make_model: MakeModel, tokenizer: PreTrainedTokenizerFast, temperature: float
) -> None:
    prompts = [[1, 3], [1, 4, 5, 6, 7], [1, 8, 9]] * 4
    engine = TransformersEngine(make_model(0), tokenizer)
    responses = engine.generate(prompts, Sampling(temperature=temperature, top_p=1.0, max_new_tokens=8), seed=0)
    rollouts = [
        sample(prompt, r.tokens, rollout_logprobs=r.rollout_logprobs, temperature=temperature)
        for prompt, r in zip(prompts, responses, strict=True)
    ]
    report = make_trainer(make_model(0), max_tokens=40).step(rollouts)
    assert report.importance_ratio_max == pytest.approx(1.0, abs=1e-4)
    assert report.importance_ratio_mean == pytest.approx(1.0, abs=1e-4)
    assert report.mismatch_kl == pytest.approx(0.0, abs=1e-5)
    assert report.effective_sample_size == pytest.approx(1.0, abs=1e-4)
    assert report.clip_fraction == 0.0


def test_the_report_says_what_its_formulas_say(make_model: MakeModel) -> None:
    ratios = np.array([0.5, 1.0, 4.0, 8.0], dtype=np.float32)
    on_policy = sample([1, 3], [4, 5, 6, 7], advantage=1.5)
    trainer_logprobs = logprobs(make_model(0), on_policy).numpy()
    report = make_trainer(make_model(0)).step([replace(on_policy, rollout_logprobs=trainer_logprobs - np.log(ratios))])
    weights = np.array([0.5, 1.0, 2.0, 2.0])
    assert report.tokens == 4
    assert report.importance_ratio_mean == pytest.approx(13.5 / 4, rel=1e-4)
    assert report.importance_ratio_max == pytest.approx(8.0, rel=1e-4)
    assert report.clip_fraction == 0.5
    assert report.weight_mean == pytest.approx(5.5 / 4, rel=1e-4)
    assert report.weight_max == 2.0
    assert report.effective_sample_size == pytest.approx(5.5**2 / (4 * 9.25), rel=1e-4)
    assert report.mismatch_kl == pytest.approx(-math.log(2.0), rel=1e-4)
    assert report.loss == pytest.approx(-float((weights * 1.5 * trainer_logprobs).mean()), rel=1e-4)


def test_the_gradient_norm_is_reported_before_it_is_clipped(make_model: MakeModel) -> None:
    free, clipped = make_trainer(make_model(0)), make_trainer(make_model(0), max_grad_norm=1e-3)
    norm = free.step(SAMPLES).grad_norm
    assert clipped.step(SAMPLES).grad_norm == norm
    for trainer, expected in ((free, norm), (clipped, 1e-3)):
        grads = [parameter.grad.flatten() for parameter in trainer.model.parameters()]
        assert torch.cat(grads).norm().item() == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(("advantage", "sign"), [(1.0, 1), (-1.0, -1)])
def test_a_step_raises_the_log_probability_of_what_did_well_and_lowers_what_did_badly(
    make_model: MakeModel, advantage: float, sign: int
) -> None:
    trainer, judged = make_trainer(make_model(0)), sample([1, 3], [4], advantage=advantage)
    before = logprobs(trainer.model, judged).item()
    trainer.step([judged])
    assert sign * (logprobs(trainer.model, judged).item() - before) > 1e-3


def test_the_loss_decides_what_a_token_weighs(make_model: MakeModel) -> None:
    on_policy = sample([1, 3], [4, 5, 6, 7], advantage=1.5)
    trainer_logprobs = logprobs(make_model(0), on_policy).numpy()
    stale = replace(on_policy, rollout_logprobs=trainer_logprobs - np.log([0.5, 1.0, 1.1, 8.0]).astype(np.float32))
    report = make_trainer(make_model(0), loss=PpoClip(clip_low=0.2, clip_high=0.2)).step([stale])
    assert report.clip_fraction == 0.25
    assert report.importance_ratio_max == pytest.approx(8.0, rel=1e-4)
    assert report.weight_max == pytest.approx(1.1, rel=1e-4)
    assert report.effective_sample_size == pytest.approx(2.6**2 / (4 * 2.46), rel=1e-4)
    assert report.loss == pytest.approx(-1.5 * (0.5 + 1.0 + 1.1 + 1.2) / 4, rel=1e-4)


def test_a_batch_whose_every_token_is_clipped_has_no_effective_samples(make_model: MakeModel) -> None:
    on_policy = sample([1, 3], [4, 5], advantage=1.0)
    stale = replace(on_policy, rollout_logprobs=logprobs(make_model(0), on_policy).numpy() - 1)
    report = make_trainer(make_model(0), loss=PpoClip(clip_low=0.2, clip_high=0.2)).step([stale])
    assert (report.effective_sample_size, report.clip_fraction, report.grad_norm) == (0.0, 1.0, 0.0)


def test_a_gradient_that_is_not_finite_is_refused_and_moves_nothing(make_model: MakeModel) -> None:
    trainer = make_trainer(make_model(0), loss=PpoClip(clip_low=0.2, clip_high=0.2))
    trainer.step(SAMPLES)
    before = trainer.state()
    # Its ratio overflows, and where the advantage is negative PPO has no upper bound.
    unbounded = sample([1, 3], [4], rollout_logprobs=[-200.0], advantage=-1.0)
    with pytest.raises(
        TrainingDiverged, match=r"^the gradient of ppo_clip on the way to version 2 has norm (nan|inf); expected"
    ):
        trainer.step([*SAMPLES, unbounded])
    assert trainer.policy_version == 1
    assert trainer.state() == before


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_trainer_that_became_another_goes_on_as_that_one_would(make_model: MakeModel, steps_before: int) -> None:
    original, copy = make_trainer(make_model(0)), make_trainer(make_model(1))
    copy.step(SAMPLES)
    for _ in range(steps_before):
        original.step(SAMPLES)
    before = original.state()
    copy.become(original)
    report = copy.step(SAMPLES)
    assert original.state() == before
    assert report == original.step(SAMPLES)
    assert copy.policy_version == original.policy_version
    assert copy.state() == original.state()


def test_each_step_is_a_new_policy_version(make_model: MakeModel) -> None:
    trainer = make_trainer(make_model(0))
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    assert trainer.policy_version == 0
    trainer.step(SAMPLES)
    trainer.step(SAMPLES)
    assert trainer.policy_version == 2
    assert all(not torch.equal(tensor, before[name]) for name, tensor in trainer.weights().items())


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_restored_trainer_goes_on_bit_for_bit(make_model: MakeModel, steps_before: int) -> None:
    never_stopped = make_trainer(make_model(0))
    for _ in range(steps_before):
        never_stopped.step(SAMPLES)
    files, random_after = never_stopped.state(), torch.rand(4)
    torch.rand(100)
    resumed = make_trainer(make_model(1))
    resumed.restore(steps_before, files)
    assert torch.equal(torch.rand(4), random_after)
    for _ in range(2):
        assert resumed.step(SAMPLES[::-1]) == never_stopped.step(SAMPLES[::-1])
    assert resumed.policy_version == never_stopped.policy_version == steps_before + 2
    for name, tensor in never_stopped.weights().items():
        assert torch.equal(resumed.weights()[name], tensor), name
    assert resumed.state() == never_stopped.state()


def test_saving_changes_nothing(make_model: MakeModel) -> None:
    saving, plain = make_trainer(make_model(0)), make_trainer(make_model(0))
    saving.step(SAMPLES)
    plain.step(SAMPLES)
    saving.state()
    assert saving.step(SAMPLES) == plain.step(SAMPLES)


def test_a_checkpoint_without_one_of_the_models_tensors_is_refused(make_model: MakeModel) -> None:
    trainer = make_trainer(make_model(0))
    files = trainer.state()
    with pytest.raises(KeyError):
        trainer.restore(0, {name: data for name, data in files.items() if name != WEIGHTS_FILE})


def test_the_weights_of_a_checkpoint_are_the_trainers(make_model: MakeModel, memory_store: MemoryStore) -> None:
    trainer = make_trainer(make_model(0))
    trainer.step(SAMPLES)
    checkpoint = CheckpointWriter(memory_store).commit(1, trainer.state(), {})
    loaded = load_weights(memory_store, checkpoint)
    assert loaded.keys() == trainer.weights().keys()
    for name, tensor in trainer.weights().items():
        assert torch.equal(loaded[name], tensor), name
