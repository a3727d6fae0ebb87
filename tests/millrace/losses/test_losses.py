"""What all losses have in common, and which name stands for which."""

from typing import get_args

import pytest
import torch
from support.bandit import Bandit

from configs.training import TrainingConfig
from millrace.errors import InputError
from millrace.losses.base import Loss, TokenLosses
from millrace.losses.factory import check_needs, make_loss
from millrace.losses.ppo_clip import PpoClip
from storage.schema import TRAJECTORY

NAMES = get_args(TrainingConfig.model_fields["loss"].annotation)
TRAINING = TrainingConfig(max_steps=1, max_importance_ratio=2.0)
LOSSES = [make_loss(TRAINING, name) for name in NAMES]
OFF_POLICY = (1.1, 0.4, 6.0, 3.0)


class NeedsReference(Loss):
    """A loss that would keep the policy near another one."""

    name = "near_reference"
    needs = frozenset({"rollout_logprobs", "ref_logprobs"})

    def __call__(
        self, trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> TokenLosses:
        raise AssertionError("never asked")


def test_there_are_four() -> None:
    assert NAMES == ("aipo", "reinforce", "ppo_clip", "cispo")


@pytest.mark.parametrize("name", NAMES)
def test_every_name_a_config_may_hold_stands_for_the_loss_of_that_name(name: str) -> None:
    assert make_loss(TRAINING, name).name == name
    assert make_loss(TRAINING.model_copy(update={"loss": name})).name == name


def test_a_losss_parameters_are_the_configs() -> None:
    training = TrainingConfig(max_steps=1, clip_low=0.1, clip_high=0.4)
    assert make_loss(training, "ppo_clip") == PpoClip(clip_low=0.1, clip_high=0.4)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        InputError, match=r'^there is no loss "grpo"; expected one of aipo, reinforce, ppo_clip, cispo$'
    ):
        make_loss(TRAINING, "grpo")


def test_every_column_that_a_loss_reads_is_stored() -> None:
    for loss in LOSSES:
        check_needs(loss, TRAJECTORY.names)


def test_a_loss_that_reads_a_column_which_is_not_stored_is_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match=r"^the loss near_reference reads ref_logprobs, which the stored .* lack; exp"):
        check_needs(NeedsReference(), TRAJECTORY.names)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_where_the_ratio_is_1_the_gradient_is_that_of_reinforce_bit_for_bit(loss: Loss) -> None:
    on_policy = Bandit()
    assert torch.equal(on_policy.gradient(loss), on_policy.gradient(make_loss(TRAINING, "reinforce")))


def test_off_policy_no_two_losses_have_the_same_gradient() -> None:
    bandit = Bandit(OFF_POLICY)
    gradients = [bandit.gradient(loss) for loss in LOSSES]
    assert not any(torch.equal(a, b) for i, a in enumerate(gradients) for b in gradients[:i])


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_the_gradient_is_the_weight_times_the_advantage_times_that_of_the_log_probability(loss: Loss) -> None:
    bandit = Bandit(OFF_POLICY)
    judged = loss(bandit.logprobs(bandit.logits_TV), bandit.rollout_logprobs_T, bandit.advantages_T)
    logits_TV = bandit.logits_TV.clone().requires_grad_()
    (expected,) = torch.autograd.grad(
        -(judged.weight * bandit.advantages_T * bandit.logprobs(logits_TV)).sum(), logits_TV
    )
    torch.testing.assert_close(bandit.gradient(loss), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_only_the_loss_itself_has_a_gradient_and_all_is_of_the_tokens_shape(loss: Loss) -> None:
    trainer_logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    judged = loss(trainer_logprobs, torch.full((2, 3), -1.5), torch.ones(2, 3))
    assert [tensor.requires_grad for tensor in judged] == [True, False, False, False]
    assert {tensor.shape for tensor in judged} == {(2, 3)}
    assert judged.clipped.dtype == torch.bool


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_a_token_is_clipped_where_its_weight_is_another_than_without_bounds(loss: Loss) -> None:
    bandit = Bandit(OFF_POLICY)
    judged = loss(bandit.logprobs(bandit.logits_TV), bandit.rollout_logprobs_T, bandit.advantages_T)
    unbounded = torch.ones(4) if loss.name == "reinforce" else judged.importance_ratio
    assert torch.equal(judged.clipped, judged.weight != unbounded)
