"""Properties that all losses have in common, and their names."""

import math
from dataclasses import replace

import pytest
import torch
from support.training.bandit import Bandit, pull, pulls, random_bandit, tokens_of, vector

from configs.losses import LOSS_NAMES
from configs.training import TrainingConfig
from millrace.errors import InputError, TrainingDiverged
from millrace.training.losses.base import LossInputs
from millrace.training.losses.excluded import check_finite
from millrace.training.losses.factory import LOSSES, Loss, make_loss

NAMES = tuple(name for name in LOSS_NAMES if name != "cross_entropy")
"""Policy-gradient losses."""
TRAINING = TrainingConfig(max_steps=1)
PARAMETERS: dict[str, dict[str, object]] = {
    "aipo": {"max_importance_ratio": 2.5},
    "decoupled_ppo": {"proximal": "interpolated"},
    "geometric_mask": {"low": 0.9, "high": 1.1},
    "gspo": {"clip_low": 0.2, "clip_high": 0.3},
}


def loss_with(name: str, **parameters: object) -> Loss:
    """The loss with these parameters, and otherwise with those above."""
    loss = {"name": name} | PARAMETERS.get(name, {}) | parameters
    return make_loss(TrainingConfig.model_validate({"max_steps": 1, "loss": loss}))


ALL = [loss_with(name) for name in NAMES]
UNBOUNDED = {("ppo_clip", -1.0), ("gspo", -1.0), ("decoupled_ppo", -1.0), ("decoupled_ppo", 1.0)}
"""Losses whose weight is the ratio itself, and the sign of A with which it is."""
each_loss = pytest.mark.parametrize("loss", ALL, ids=NAMES)


def test_each_loss_has_a_name_in_configs() -> None:
    assert {*NAMES, "cross_entropy"} == set(LOSSES)
    assert [loss.name for loss in ALL] == list(NAMES)


def test_cross_entropy_pulls_each_token_by_1_whatever_its_advantage_and_ratio() -> None:
    bandit = random_bandit(0)
    loss = loss_with("cross_entropy")
    outputs = loss(bandit.tokens())
    assert torch.equal(outputs.loss, -bandit.logprobs(bandit.logits_NV))
    assert torch.equal(pulls(loss, bandit.tokens()), torch.ones_like(outputs.loss))
    assert torch.equal(outputs.weight, torch.ones_like(outputs.loss))
    assert not loss.needs_advantage


CHANGED = {
    "aipo": {"max_importance_ratio": 1.2},
    "ppo_clip": {"clip_low": 0.4, "clip_high": 0.6, "dual_clip": 1.5},
    "decoupled_ppo": {"clip_low": 0.4, "clip_high": 0.6, "proximal": "recomputed"},
    "cispo": {"clip_high": 0.6},
    "tis": {"max_importance_ratio": 1.5},
    "sequence_tis": {"max_importance_ratio": 1.5},
    "icepop": {"low": 0.7, "high": 1.3},
    "sequence_mask": {"low": 0.01, "high": 100},
    "geometric_mask": {"low": 0.7, "high": 1.3, "max_importance_ratio": 1.01},
    "gspo": {"clip_low": 0.9, "clip_high": 9},
    "sapo": {"tau_positive": 2.0, "tau_negative": 3.0},
    "dppo_tv": {"max_divergence": 0.3, "max_importance_ratio": 1.5},
}
"""Each parameter of each loss, with a value other than it has above or by default."""


def test_the_table_has_every_parameter_of_every_loss() -> None:
    for loss in ALL:
        parameters = type(loss.parameters).model_fields.keys() - {"name"}
        assert parameters == CHANGED.get(loss.name, {}).keys()


@pytest.mark.parametrize(
    ("name", "parameter"), [(name, parameter) for name, changed in CHANGED.items() for parameter in changed]
)
def test_a_parameter_changes_its_loss(name: str, parameter: str) -> None:
    changed, default = loss_with(name, **{parameter: CHANGED[name][parameter]}), loss_with(name)
    bandits = [random_bandit(seed) for seed in range(4)]
    assert any(not torch.equal(bandit.gradient(changed), bandit.gradient(default)) for bandit in bandits)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(InputError):
        make_loss(TRAINING, "grpo")


@each_loss
def test_where_the_ratio_is_1_the_gradient_is_that_of_reinforce(loss: Loss) -> None:
    on_policy = Bandit(lengths=(1, 3), staleness=(0, 2))
    expected = on_policy.gradient(make_loss(TRAINING, "reinforce"))
    torch.testing.assert_close(on_policy.gradient(loss), expected, rtol=1e-15, atol=0)


def test_off_policy_no_two_losses_have_the_same_gradient() -> None:
    bandit = random_bandit(0)
    gradients = [bandit.gradient(loss) for loss in ALL]
    same = [(NAMES[i], NAMES[j]) for i in range(len(ALL)) for j in range(i) if torch.equal(gradients[i], gradients[j])]
    assert same == []


@pytest.mark.parametrize("seed", range(20))
@each_loss
def test_the_gradient_is_weight_times_advantage(loss: Loss, seed: int) -> None:
    bandit = random_bandit(seed)
    weight_N = loss(bandit.tokens()).weight
    torch.testing.assert_close(pulls(loss, bandit.tokens()), weight_N * bandit.advantages_N, rtol=1e-12, atol=1e-15)


@each_loss
def test_only_the_loss_has_a_gradient_and_all_have_the_tokens_shape(loss: Loss) -> None:
    tokens = tokens_of(
        torch.full((3,), -1.0, requires_grad=True), torch.full((3,), -1.5), torch.ones(3), lengths=(2, 1)
    )
    outputs = loss(tokens)[:4]
    assert [tensor.requires_grad for tensor in outputs] == [True, False, False, False]
    assert {tensor.shape for tensor in outputs} == {(3,)}
    assert [tensor.dtype for tensor in outputs] == [torch.float32] * 3 + [torch.bool]


@each_loss
def test_the_importance_ratio_is_the_tokens_own_and_unclipped(loss: Loss) -> None:
    bandit = random_bandit(3)
    assert torch.equal(loss(bandit.tokens()).importance_ratio, bandit.ratio(bandit.logits_NV))


@each_loss
def test_a_microbatch_without_tokens_has_no_losses(loss: Loss) -> None:
    outputs = loss(tokens_of(vector(requires_grad=True), vector(), vector(), lengths=(0, 0)))
    assert outputs.loss.shape == outputs.weight.shape == (0,)
    outputs.loss.sum().backward()


@each_loss
def test_the_losses_of_a_response_do_not_depend_on_other_responses(loss: Loss) -> None:
    bandit = random_bandit(5)
    tokens = bandit.tokens()
    together = loss(tokens)
    for response in range(tokens.num_responses):
        own_N = tokens.response_N == response
        alone = loss(
            LossInputs(
                trainer_logprobs_N=tokens.trainer_logprobs_N[own_N],
                rollout_logprobs_N=tokens.rollout_logprobs_N[own_N],
                advantages_N=tokens.advantages_N[own_N],
                response_N=torch.zeros(int(own_N.sum()), dtype=torch.int64),
                num_responses=1,
                staleness_N=tokens.staleness_N[own_N],
            )
        )
        for part, whole in zip(alone[:4], together[:4], strict=True):
            assert torch.equal(part, whole[own_N])


@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
@each_loss
def test_a_token_without_advantage_has_neither_loss_nor_gradient(loss: Loss, log_ratio: float) -> None:
    token = tokens_of(vector(-1.0), vector(-1.0 - log_ratio), vector(0.0))
    assert loss(token).loss.item() == 0.0
    assert pull(loss, -1.0, -1.0 - log_ratio, 0.0) == 0.0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@each_loss
def test_where_the_ratio_overflows_bounded_losses_stay_finite(loss: Loss, advantage: float) -> None:
    pulled = pull(loss, -1.0, -1001.0, advantage)
    assert math.isfinite(pulled) == ((loss.name, advantage) not in UNBOUNDED)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@each_loss
def test_where_the_ratio_vanishes_a_token_has_no_gradient(loss: Loss, advantage: float) -> None:
    by_1 = loss.name == "reinforce" or (loss.name == "topr" and advantage > 0)
    assert pull(loss, -1001.0, -1.0, advantage) == (advantage if by_1 else 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", ["trainer_logprobs_N", "rollout_logprobs_N", "advantages_N"])
def test_what_is_not_finite_is_refused(column: str, value: float) -> None:
    sound = tokens_of(vector(-1.0, -2.0, -3.0), vector(-1.0, -1.0, -1.0), vector(1.0, 0.0, -1.0))
    check_finite(sound)
    with pytest.raises(TrainingDiverged):
        check_finite(replace(sound, **{column: vector(-1.0, value, -1.0)}))
