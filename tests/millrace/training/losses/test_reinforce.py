"""REINFORCE: every token weighs 1."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training.bandit import Bandit, judge, make, pull

from millrace.training.losses.reinforce import Reinforce

logprobs = st.floats(-20.0, 0.0)


@given(logprobs, logprobs, st.floats(-10.0, 10.0))
def test_a_token_weighs_1_however_likely_the_behaviour_policy_thought_it(
    trainer: float, rollout: float, advantage: float
) -> None:
    assert pull(make(Reinforce), trainer, rollout, advantage) == advantage


def test_autograd_agrees_with_finite_differences_of_the_mean_log_probability() -> None:
    bandit = Bandit((1.0, 0.4, 6.0, 0.01))

    def objective(logits_NV: torch.Tensor) -> torch.Tensor:
        return -(bandit.advantages_N * bandit.logprobs(logits_NV)).sum()

    torch.testing.assert_close(
        bandit.gradient(make(Reinforce)), bandit.central_differences(objective), rtol=1e-7, atol=1e-8
    )


def test_the_ratio_that_it_does_not_use_is_told_and_nothing_is_clipped() -> None:
    judged = judge(make(Reinforce), -1.0, -2.0, 0.5)
    assert judged.importance_ratio.item() == pytest.approx(math.e)
    assert judged.weight.item() == 1.0
    assert not judged.clipped.item()
