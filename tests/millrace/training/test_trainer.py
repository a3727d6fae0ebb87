"""The trainer: a step is the same for any split, agrees with its report, and is restored bit for bit."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.one_by_one import response_logprobs, taken
from support.training.samples import make_sample
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from configs.losses import LOSS_NAMES
from configs.training import TrainingConfig
from millrace.errors import DeviceOutOfMemory, InputError, TrainingDiverged, WeightsMismatch
from millrace.generation.engines.transformers import TransformersEngine
from millrace.training.batch import Sample
from millrace.training.checkpoints.names import WEIGHTS_FILE
from millrace.training.objective import Objective
from millrace.training.parallel.ranks import ALONE, Ranks
from millrace.training.trainer import Trainer
from millrace.types import Response, Sampling

MakeModel = Callable[..., LlamaForCausalLM]

RHO = 2.0
AIPO = {"loss": {"name": "aipo", "max_importance_ratio": RHO}}
GSPO = {"loss": {"name": "gspo", "clip_low": 0.5, "clip_high": 0.5}}
PPO = {"loss": "ppo_clip"}


def make_trainer(
    model: LlamaForCausalLM,
    *,
    reference: LlamaForCausalLM | None = None,
    ranks: Ranks = ALONE,
    **parameters: Any,
) -> Trainer:
    """`parameters` are of the section `training`."""
    training = TrainingConfig.model_validate(
        {
            "max_steps": 1,
            **AIPO,
            "learning_rate": 1e-3,
            "weight_decay": 0.01,
            "max_grad_norm": 1e9,
            "max_tokens_per_microbatch": 1000,
            **parameters,
        }
    )
    return Trainer(model, training, reference=reference, ranks=ranks)


def sample(prompt: Sequence[int], response: Sequence[int], **values: Any) -> Sample:
    return make_sample(prompt, response, **{"rollout_logprobs": -2.0, **values})


def on_policy_sample(prompt: Sequence[int], response: Response, temperature: float) -> Sample:
    """An engine's response as a sample for the trainer."""
    return replace(
        sample(prompt, response.tokens, rollout_logprobs=response.rollout_logprobs, temperature=temperature),
        kept_tokens=np.array(response.kept_tokens, np.int32),
        kept_counts=np.array(response.kept_counts, np.int32),
    )


def logprobs(model: LlamaForCausalLM, of: Sample) -> torch.Tensor:
    """[R] log π of the sample's response after its temperature, computed alone and without packing."""
    with torch.no_grad():
        return taken(response_logprobs(model, of), of)


def drawn(seed: int, size: int) -> list[Sample]:
    """Samples of many shapes; some of their tokens are masked, and all tokens of some responses."""
    random = np.random.default_rng(seed)
    result = []
    for number in range(size):
        length = int(random.integers(1, 9))
        mask = random.random(length) < 0.7
        mask[0] |= number == 0
        result.append(
            replace(
                sample(random.integers(1, 15, random.integers(1, 6)), random.integers(1, 15, length)),
                rollout_logprobs=-3 * random.random(length, dtype=np.float32),
                loss_mask=mask.astype(np.uint8),
                temperature=float(random.choice([0.5, 1.0, 1.5])),
                advantage=float(random.normal()),
                staleness=int(random.integers(0, 3)),
            )
        )
    return result


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in trainer.model.named_parameters() if parameter.grad is not None}


SAMPLES = [
    sample([1, 3, 4], [5, 6, 2], advantage=0.5),
    sample([1, 7], [8, 2], advantage=-1.0, temperature=0.7),
    sample([1, 9, 10, 11], [12, 13, 14, 3, 2], advantage=1.5, loss_mask=[1, 0, 1, 1, 1]),
    sample([1, 5, 6], [2], advantage=-0.25, temperature=1.3),
    sample([1, 3], [4, 5, 6, 7, 8, 9], advantage=1.0),
]


@dataclass(frozen=True, kw_only=True)
class InTurn(Ranks):
    """A rank that steps after the others in this process: the sums of the last rank are complete."""

    so_far: dict[torch.Size, list[torch.Tensor]]
    """Tensors by their shape, which differs between the sums for the reference and for the report."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self.so_far[tensor.shape].append(tensor.clone())
        return tensor.copy_(torch.stack(self.so_far[tensor.shape]).sum(dim=0))


def in_turn(num_ranks: int) -> list[InTurn]:
    so_far = defaultdict[torch.Size, list[torch.Tensor]](list)
    alone = {field.name: getattr(ALONE, field.name) for field in fields(ALONE)}
    return [InTurn(**{**alone, "data_rank": rank, "data_size": num_ranks}, so_far=so_far) for rank in range(num_ranks)]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    size=st.integers(1, 12),
    max_tokens=st.integers(1, 60),
    num_ranks=st.integers(1, 4),
    loss=st.sampled_from([AIPO, GSPO]),
    aggregation=st.sampled_from(["token_mean", "sequence_mean", "constant"]),
)
def test_any_split_into_microbatches_and_ranks_gives_the_same_gradient_and_report(
    make_model: MakeModel, seed: int, size: int, max_tokens: int, num_ranks: int, loss: dict[str, Any], aggregation: str
) -> None:
    """To 1e-6 of the gradient's norm and float32's precision; with a KL to the reference, which is another model."""
    samples = drawn(seed, size)
    objective = {**loss, "aggregation": aggregation, "kl": {"coefficient": 0.1}}
    whole = make_trainer(make_model(0), reference=make_model(1), **objective)
    expected = whole.step(samples)
    total: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(()))
    for ranks in in_turn(num_ranks):
        part = make_trainer(
            make_model(0), reference=make_model(1), ranks=ranks, max_tokens_per_microbatch=max_tokens, **objective
        )
        report = part.step(samples)
        for name, grad in gradients(part).items():
            total[name] = total[name] + grad
    for name, grad in gradients(whole).items():
        torch.testing.assert_close(total[name], grad, rtol=0, atol=1e-6 * max(1.0, expected.grad_norm), msg=name)
    # Here each rank updates by its own share of the gradient alone.
    own = {"grad_norm": expected.grad_norm, "changed_weight_share": expected.changed_weight_share}
    assert report.measured() | own == pytest.approx(expected.measured(), rel=1e-4, abs=1e-5)
    for ours, other in zip(report.trainer_logprobs, expected.trainer_logprobs, strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_is_that_of_the_token_mean_written_out_by_hand(make_model: MakeModel, checkpointing: bool) -> None:
    trainer = make_trainer(make_model(0), max_tokens_per_microbatch=20, activation_checkpointing=checkpointing)
    trainer.step(SAMPLES)
    model, loss = make_model(0), torch.zeros(())
    for each in SAMPLES:
        trainer_logprobs = taken(response_logprobs(model, each), each)
        ratio = (trainer_logprobs.detach() - torch.from_numpy(each.rollout_logprobs)).exp()
        per_token = -ratio.clamp(max=RHO) * each.advantage * trainer_logprobs
        loss = loss + (per_token * torch.from_numpy(each.loss_mask)).sum()
    torch.autograd.backward(loss / sum(int(each.loss_mask.sum()) for each in SAMPLES))
    result = gradients(trainer)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result[name], parameter.grad, rtol=0, atol=1e-6, msg=name)


def test_the_reference_stays_what_it_was_and_the_kl_to_oneself_is_nothing(make_model: MakeModel) -> None:
    reference = make_model(0)
    held = make_trainer(make_model(0), reference=reference, kl={"coefficient": 5.0})
    free = make_trainer(make_model(0))
    assert held.step(SAMPLES) == free.step(SAMPLES)
    assert held.step(SAMPLES).kl_to_reference > 0
    for (name, parameter), other in zip(reference.named_parameters(), make_model(0).parameters(), strict=True):
        assert torch.equal(parameter, other), name
        assert parameter.grad is None, name


def test_a_masked_token_changes_only_its_successors_context(make_model: MakeModel) -> None:
    masked = sample([1, 3], [4, 5, 6], loss_mask=[1, 0, 1])
    report = make_trainer(make_model(0)).step([masked])
    other = replace(masked, rollout_logprobs=np.array([-2.0, 0.0, -2.0], dtype=np.float32))
    assert make_trainer(make_model(0)).step([other]) == report
    assert report.tokens == 2
    # Its log π is reported too: the trainer stores that of every token.
    assert report.trainer_logprobs[0] == pytest.approx(logprobs(make_model(0), masked).numpy(), abs=1e-5)


def test_a_masked_batch_is_refused(make_model: MakeModel) -> None:
    trainer = make_trainer(make_model(0))
    with pytest.raises(InputError):
        trainer.step([sample([1, 3], [4], loss_mask=[0])])
    assert trainer.policy_version == 0


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("top_p", [0.3, 0.6, 0.9, 0.95, 1.0])
def test_trainer_and_generator_agree_on_what_an_on_policy_token_is(
    make_model: MakeModel, tokenizer: PreTrainedTokenizerFast, temperature: float, top_p: float
) -> None:
    prompts = [[1, 3], [1, 4, 5, 6, 7], [1, 8, 9]] * 4
    engine = TransformersEngine(make_model(0), tokenizer)
    responses = engine.generate(prompts, Sampling(temperature=temperature, top_p=top_p, max_new_tokens=8), seed=0)
    rollouts = [on_policy_sample(prompt, r, temperature) for prompt, r in zip(prompts, responses, strict=True)]
    report = make_trainer(make_model(0), max_tokens_per_microbatch=40).step(rollouts)
    ratios = np.exp(
        np.concatenate(
            [ours - item.rollout_logprobs for ours, item in zip(report.trainer_logprobs, rollouts, strict=True)]
        )
    )
    np.testing.assert_allclose(ratios, 1.0, rtol=0, atol=1e-5)
    assert report.importance_ratio_max == pytest.approx(1.0, abs=1e-5)
    assert report.importance_ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert report.mismatch_kl == pytest.approx(0.0, abs=1e-5)
    assert report.effective_sample_size == pytest.approx(1.0, abs=1e-5)
    assert report.clip_fraction == 0.0


def test_on_truncated_rollouts_the_reference_policy_is_renormalised_too(
    make_model: MakeModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine = TransformersEngine(make_model(0), tokenizer)
    (response,) = engine.generate([[1, 3]], Sampling(temperature=1.0, top_p=0.6, max_new_tokens=8), seed=0)
    rollout = on_policy_sample([1, 3], response, 1.0)
    kl = {"estimator": "k1", "coefficient": 0.1}
    same = make_trainer(make_model(0), reference=make_model(0), kl=kl).step([rollout])
    assert same.kl_to_reference == pytest.approx(0.0, abs=1e-6)
    other = make_trainer(make_model(0), reference=make_model(1), kl=kl).step([rollout])
    expected = (logprobs(make_model(0), rollout) - logprobs(make_model(1), rollout)).mean().item()
    assert other.kl_to_reference == pytest.approx(expected, abs=1e-5)


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
    assert report.chi_square == pytest.approx((0.25 + 1 + 16 + 64) / 4 - 1, rel=1e-4)
    assert (report.importance_ratio_p05, report.importance_ratio_p50, report.importance_ratio_p95) == pytest.approx(
        (0.5, 1.0, 4.0), rel=1e-4
    )
    assert report.kl_to_reference == 0.0
    assert report.mismatch_kl == pytest.approx(-math.log(2.0), rel=1e-4)
    assert report.loss == pytest.approx(-float((weights * 1.5 * trainer_logprobs).mean()), rel=1e-4)


SOME_WITHOUT_ADVANTAGE = [*SAMPLES, sample([1, 4], [6, 7, 2], advantage=0.0), sample([1, 8, 3], [9, 2], advantage=0.0)]


def test_figures_of_ratios_leave_demonstrations_out_unless_a_step_has_nothing_else(make_model: MakeModel) -> None:
    shown = [replace(each, is_demonstration=True, rollout_logprobs=0 * each.rollout_logprobs) for each in SAMPLES[3:]]
    names = (
        "importance_ratio_mean",
        "effective_sample_size",
        "ratio_effective_sample_size",
        "weight_max",
        "mismatch_kl",
    )
    of = {
        name: make_trainer(make_model(0)).step(samples)
        for name, samples in (("sampled", SAMPLES[:3]), ("both", [*SAMPLES[:3], *shown]), ("shown", shown))
    }
    for name in names:
        assert getattr(of["both"], name) == pytest.approx(getattr(of["sampled"], name), rel=1e-5)
    assert of["both"].tokens == of["sampled"].tokens + of["shown"].tokens
    assert of["shown"].mismatch_kl > 1


@pytest.mark.parametrize("loss", [name for name in LOSS_NAMES if name != "cross_entropy"])
def test_samples_without_advantage_take_no_backward_pass(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    trainer, whole = (make_trainer(make_model(0), loss=loss) for _ in range(2))
    passes = []
    trainer.policy.register_forward_pre_hook(
        lambda _, arguments: passes.append((torch.is_grad_enabled(), sorted(arguments[0].indices)))
    )
    report = trainer.step(SOME_WITHOUT_ADVANTAGE)
    monkeypatch.setattr(Objective, "has_gradient", lambda *_: True)
    expected = whole.step(SOME_WITHOUT_ADVANTAGE)
    assert passes == [(True, [0, 1, 2, 3, 4]), (False, [5, 6])]
    assert report.measured() == pytest.approx(expected.measured(), rel=1e-5, abs=1e-7)
    for ours, other in zip(report.trainer_logprobs, expected.trainer_logprobs, strict=True):
        np.testing.assert_allclose(ours, other, rtol=0, atol=1e-5)
    whole_gradients = gradients(whole)
    for name, gradient in gradients(trainer).items():
        torch.testing.assert_close(gradient, whole_gradients[name], rtol=0, atol=1e-6, msg=name)


def test_a_step_without_any_advantage_moves_the_weights_as_the_momentum_does(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipping, whole = make_trainer(make_model(0)), make_trainer(make_model(0))
    for trainer in (skipping, whole):
        trainer.step(SAMPLES)
    state = {name: parameter.clone() for name, parameter in skipping.model.named_parameters()}
    assert skipping.step([replace(item, advantage=0.0) for item in SAMPLES]).grad_norm == 0.0
    monkeypatch.setattr(Objective, "has_gradient", lambda *_: True)
    whole.step([replace(item, advantage=0.0) for item in SAMPLES])
    assert skipping.state() == whole.state()
    assert not torch.equal(dict(skipping.model.named_parameters())["model.norm.weight"], state["model.norm.weight"])


def test_a_sample_without_advantage_pulls_towards_the_reference(make_model: MakeModel) -> None:
    trainer = make_trainer(make_model(0), reference=make_model(1), kl={"coefficient": 0.1})
    assert trainer.step([replace(item, advantage=0.0) for item in SAMPLES]).grad_norm > 0


def test_the_gradient_norm_is_reported_before_it_is_clipped(make_model: MakeModel) -> None:
    free, clipped = make_trainer(make_model(0)), make_trainer(make_model(0), max_grad_norm=1e-3)
    norm = free.step(SAMPLES).grad_norm
    assert clipped.step(SAMPLES).grad_norm == norm
    for trainer, expected in ((free, norm), (clipped, 1e-3)):
        grads = [grad.flatten() for grad in gradients(trainer).values()]
        assert torch.cat(grads).norm().item() == pytest.approx(expected, rel=1e-2)


def test_a_batch_whose_every_token_is_clipped_has_no_effective_samples(make_model: MakeModel) -> None:
    on_policy = sample([1, 3], [4, 5], advantage=1.0)
    stale = replace(on_policy, rollout_logprobs=logprobs(make_model(0), on_policy).numpy() - 1)
    report = make_trainer(make_model(0), **PPO).step([stale])
    assert (report.effective_sample_size, report.clip_fraction, report.grad_norm) == (0.0, 1.0, 0.0)


def test_a_gradient_that_is_not_finite_is_refused_and_moves_nothing(make_model: MakeModel) -> None:
    trainer = make_trainer(make_model(0), **PPO)
    trainer.step(SAMPLES)
    state = trainer.state()
    # Its ratio overflows, and where the advantage is negative PPO has no upper bound.
    unbounded = sample([1, 3], [4], rollout_logprobs=[-200.0], advantage=-1.0)
    with pytest.raises(TrainingDiverged):
        trainer.step([*SAMPLES, unbounded])
    assert trainer.policy_version == 1
    assert trainer.state() == state


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, {"training.activation_checkpointing", "training.optimizer_offload"}),
        ({"activation_checkpointing": True}, {"training.optimizer_offload"}),
        ({"activation_checkpointing": True, "optimizer_offload": True}, set()),
    ],
)
def test_a_step_without_memory_names_the_settings_that_save_some(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], named: set[str]
) -> None:
    def allocate(*_: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which 1.50 GiB "
            "is free. Process 7 has 77.68 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch"
        )

    trainer = make_trainer(make_model(0), **settings)
    monkeypatch.setattr(Objective, "compute", allocate)
    with pytest.raises(DeviceOutOfMemory) as caught:
        trainer.step([sample([1, 2], [3, 4])])
    assert caught.value.key == "training.max_tokens_per_microbatch"
    assert "2.00 GiB" in caught.value.read
    assert "79.18 GiB" in caught.value.read
    offered = {"training.activation_checkpointing", "training.optimizer_offload"}
    assert {key for key in offered if key in str(caught.value.expected)} == named
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("spoilt", ["rollout_logprobs", "advantage"])
def test_a_sample_that_is_not_finite_is_refused_and_moves_nothing(make_model: MakeModel, spoilt: str) -> None:
    trainer = make_trainer(make_model(0))
    state = trainer.state()
    value: Any = np.array([np.nan], dtype=np.float32) if spoilt == "rollout_logprobs" else math.inf
    with pytest.raises(TrainingDiverged):
        trainer.step([*SAMPLES, replace(sample([1, 3], [4]), **{spoilt: value})])
    assert (trainer.policy_version, trainer.state()) == (0, state)


@pytest.mark.parametrize("ratio_overflows", [True, False])
def test_a_token_that_is_not_finite_can_be_masked(make_model: MakeModel, ratio_overflows: bool) -> None:
    # A larger epsilon: otherwise AdamW turns a gradient that is all rounding into a whole update.
    masking = {**PPO, "non_finite": "mask", "entropy_coefficient": 0.1, "adamw": {"epsilon": 1.0}}
    good, bad = sample([1, 3], [4, 5]), sample([1, 3], [4], rollout_logprobs=[-200.0], advantage=-1.0)
    if not ratio_overflows:
        bad = replace(sample([1, 3], [4]), advantage=math.inf)
    trainer, expected = (make_trainer(make_model(0), **masking, aggregation="constant") for _ in range(2))
    report = trainer.step([good, bad])
    assert (report.non_finite_tokens, report.tokens) == (1, 3)
    assert all(math.isfinite(value) for value in report.measured().values())
    # Both count it among the responses: a masked response has a mask of 0.
    without = expected.step([good, replace(sample([1, 3], [4]), loss_mask=np.zeros(1, dtype=np.uint8))])
    assert (without.non_finite_tokens, without.tokens) == (0, 2)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter, expected.model.get_parameter(name), rtol=1e-6, atol=1e-9)


def test_a_response_that_a_mask_drops_has_no_gradient(make_model: MakeModel) -> None:
    stale = sample([1, 3], [4, 5], rollout_logprobs=[-20.0, -2.0])
    trainer = make_trainer(make_model(0), masks={"max_token_ratio": 100})
    report = trainer.step([stale])
    assert (report.grad_norm, report.clip_fraction, report.weight_max) == (0.0, 1.0, 0.0)
    assert report.importance_ratio_max > 100


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_copied_trainer_continues_as_the_original(make_model: MakeModel, steps_before: int) -> None:
    original, copy = make_trainer(make_model(0)), make_trainer(make_model(1))
    copy.step(SAMPLES)
    for _ in range(steps_before):
        original.step(SAMPLES)
    state = original.state()
    copy.copy_state_from(original)
    report = copy.step(SAMPLES)
    assert original.state() == state
    assert report == original.step(SAMPLES)
    assert copy.policy_version == original.policy_version
    assert copy.state() == original.state()


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_restored_trainer_continues_bit_for_bit(make_model: MakeModel, steps_before: int) -> None:
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


def test_saving_changes_nothing_and_stores_the_weights(make_model: MakeModel) -> None:
    saving, plain = make_trainer(make_model(0)), make_trainer(make_model(0))
    saving.step(SAMPLES)
    plain.step(SAMPLES)
    stored = safetensors.torch.load(saving.state()[WEIGHTS_FILE])
    assert stored.keys() == saving.weights().keys()
    for name, tensor in saving.weights().items():
        assert torch.equal(stored[name], tensor), name
    assert saving.step(SAMPLES) == plain.step(SAMPLES)


def test_a_checkpoint_without_one_of_the_models_tensors_is_refused(make_model: MakeModel) -> None:
    trainer = make_trainer(make_model(0))
    files = trainer.state()
    with pytest.raises(WeightsMismatch):
        trainer.restore(0, {name: data for name, data in files.items() if name != WEIGHTS_FILE})


def test_what_is_likeliest_to_follow_is_what_the_model_says_alone(make_model: MakeModel) -> None:
    tokens = [1, 3, 4, 5]
    logits_V = make_model(0)(input_ids=torch.tensor([tokens])).logits[0, -1]
    best = torch.log_softmax(logits_V, dim=-1).topk(5)
    result = make_trainer(make_model(0)).next_logprobs(tokens, 5)
    assert list(result) == best.indices.tolist()
    assert list(result.values()) == pytest.approx(best.values.tolist(), abs=1e-5)
    assert len(make_trainer(make_model(0)).next_logprobs(tokens, 10**6)) == make_model(0).config.vocab_size


def test_a_step_follows_the_training_section(make_model: MakeModel) -> None:
    trainer = make_trainer(
        make_model(0),
        reference=make_model(1),
        loss="reinforce",
        aggregation="constant",
        kl={"coefficient": 0.5, "estimator": "k2"},
        activation_checkpointing=True,
        max_tokens_per_microbatch=20,
        max_grad_norm=0.01,
        learning_rate=3e-3,
        weight_decay=0.5,
        # Otherwise AdamW magnifies the rounding of the smallest gradients.
        adamw={"epsilon": 1e-6},
    )
    by_hand, reference = make_model(0).train(), make_model(1)
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=3e-3, weight_decay=0.5, eps=1e-6)
    losses, kls = [], []
    for item in SAMPLES:
        carries = torch.from_numpy(item.loss_mask).bool()
        logprobs_R = taken(response_logprobs(by_hand, item), item)[carries]
        losses.append(-item.advantage * logprobs_R)
        kls.append((logprobs_R - logprobs(reference, item)[carries]) ** 2 / 2)
    # Longest response of 7: the aggregation `constant` divides 5 responses' losses by 35.
    ((torch.cat(losses) + 0.5 * torch.cat(kls)).sum() / 35).backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.01)
    optimizer.step()

    assert trainer.loss.name == "reinforce"
    assert trainer.model.is_gradient_checkpointing
    assert not make_trainer(make_model(0)).model.is_gradient_checkpointing
    assert len(trainer.microbatches(SAMPLES)) > len(make_trainer(make_model(0)).microbatches(SAMPLES)) == 1
    report = trainer.step([replace(item, max_new_tokens=7) for item in SAMPLES])
    assert report.loss == pytest.approx(torch.cat(losses).sum().item() / 35, rel=1e-5)
    assert report.kl_to_reference == pytest.approx(torch.cat(kls).mean().item(), rel=1e-5)
    assert report.grad_norm == pytest.approx(grad_norm.item(), rel=1e-5)
    assert report.grad_norm > 0.01, "the gradient is clipped"
    expected_weights, weights, clipped = dict(by_hand.named_parameters()), trainer.weights(), gradients(trainer)
    assert weights.keys() == clipped.keys() == expected_weights.keys()
    for name, expected in expected_weights.items():
        assert expected.grad is not None
        torch.testing.assert_close(clipped[name], expected.grad, rtol=1e-3, atol=1e-7)
        torch.testing.assert_close(weights[name], expected.detach(), rtol=1e-5, atol=1e-6)
