"""Losses and advantages by import path: valid functions are used, and invalid ones are user errors."""

import pytest
import torch
from support.training.bandit import random_bandit
from support.training.own_functions import BOUND

from configs.training import TrainingConfig
from millrace.errors import InputError, TrainingDiverged
from millrace.training.losses.factory import make_loss
from millrace.training.samples import make_estimator

OWN = "tests.support.training.own_functions"


def training(**values: object) -> TrainingConfig:
    return TrainingConfig.model_validate({"max_steps": 1, **values})


def test_a_loss_of_your_own_is_the_one_that_it_computes() -> None:
    custom = make_loss(training(loss=f"{OWN}:capped"))
    built_in = make_loss(training(loss={"name": "aipo", "max_importance_ratio": BOUND}))
    assert custom.name == f"{OWN}:capped"
    for seed in range(4):
        tokens = random_bandit(seed).tokens()
        for values, expected in zip(custom(tokens)[:4], built_in(tokens)[:4], strict=True):
            assert torch.equal(values, expected)


@pytest.mark.parametrize(
    "path",
    [
        "tests.support.nowhere:f",
        *(
            f"{OWN}:{name}"
            for name in (
                "nothing",
                "NOT_A_FUNCTION",
                "of_one",
                "a_tensor",
                "of_columns",
                "of_numbers",
                "without_gradient",
                "fails",
            )
        ),
    ],
)
def test_a_loss_that_can_not_be_used_is_one_sentence_before_anything_is_trained(path: str) -> None:
    with pytest.raises(InputError) as caught:
        make_loss(training(loss=path))
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_loss_that_is_not_finite_is_refused_unless_such_tokens_are_masked() -> None:
    path = f"{OWN}:not_finite"
    with pytest.raises(TrainingDiverged):
        make_loss(training(loss=path))
    make_loss(training(loss=path, non_finite="mask"))


def test_an_advantage_of_your_own_is_what_it_computes() -> None:
    assert make_estimator(f"{OWN}:better_than_half")([[1, 0], [0.5]]) == [[0.5, -0.5], [0.0]]


@pytest.mark.parametrize(
    "name",
    ["nothing", "capped", "one_group", "a_member_less", "a_number", "of_text", "infinite", "divides"],
)
def test_an_advantage_that_can_not_be_used_is_one_sentence_before_training(name: str) -> None:
    with pytest.raises(InputError) as caught:
        make_estimator(f"{OWN}:{name}")
    assert f"{OWN}:{name}" in str(caught.value)
    assert "\n" not in str(caught.value)
