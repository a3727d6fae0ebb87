"""Losses and advantages by import path: what they return is trained on, and what can't be used is a sentence."""

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
    own = make_loss(training(loss=f"{OWN}:capped"))
    built_in = make_loss(training(loss={"name": "aipo", "max_importance_ratio": BOUND}))
    assert own.name == f"{OWN}:capped"
    for seed in range(4):
        tokens = random_bandit(seed).tokens()
        for ours, expected in zip(own(tokens), built_in(tokens), strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("tests.support.nowhere:f", r"expected a module that can be imported \(ModuleNotFoundError: "),
        (f"{OWN}:nothing", f'expected a function "nothing" in {OWN}'),
        (f"{OWN}:NOT_A_FUNCTION", f'expected a function "NOT_A_FUNCTION" in {OWN}'),
        (f"{OWN}:of_one", r"expected a function of \(tokens, training\) \(too many positional arguments\)"),
    ],
)
def test_a_loss_that_is_not_there_or_can_not_be_called_is_one_sentence(path: str, expected: str) -> None:
    with pytest.raises(InputError, match=f'^training.loss is "{path}"; {expected}') as caught:
        make_loss(training(loss=path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("a_tensor", "it returned Tensor; expected TokenLosses"),
        ("of_columns", r"its weight has the shape \[4, 1\]; expected \[4\], per token"),
        ("of_numbers", "its clipped is of type bool; expected a tensor"),
        ("without_gradient", "its loss has no gradient; expected one that depends on tokens.trainer_logprobs_N"),
        ("fails", r"KeyError: 'beta\\nand more'"),
    ],
)
def test_a_loss_that_returns_something_else_is_one_sentence_before_anything_is_trained(name: str, what: str) -> None:
    with pytest.raises(InputError, match=f'^training.loss is "{OWN}:{name}", which can\'t be used: {what}$') as caught:
        make_loss(training(loss=f"{OWN}:{name}"))
    assert "\n" not in str(caught.value)


def test_a_loss_that_is_not_finite_is_one_sentence_unless_such_tokens_are_masked() -> None:
    path = f"{OWN}:not_finite"
    with pytest.raises(TrainingDiverged, match=rf"^the loss {path} or its weight is not finite at 4 of 4 tokens that"):
        make_loss(training(loss=path))
    make_loss(training(loss=path, non_finite="mask"))


def test_an_advantage_of_ones_own_is_the_one_that_it_computes() -> None:
    assert make_estimator(f"{OWN}:better_than_half")([[1, 0], [0.5]]) == [[0.5, -0.5], [0.0]]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing", f'"{OWN}:nothing"; expected a function "nothing" in {OWN}'),
        ("capped", rf'"{OWN}:capped"; expected a function of \(rewards\) \(missing a required argument: '),
        ("one_group", "which can't be used: of the batch it returned 1 values; expected 2, one per group"),
        ("a_member_less", "which can't be used: of group 0 it returned 1 values; expected 2, one per reward"),
        ("a_number", "which can't be used: of the batch it returned float; expected a list"),
        ("of_text", "which can't be used: an advantage is of type str; expected a number"),
        ("infinite", "which can't be used: an advantage is inf; expected a finite number"),
        ("divides", "which can't be used: ZeroDivisionError: "),
    ],
)
def test_an_advantage_that_can_not_be_used_is_one_sentence_before_anything_is_trained(name: str, sentence: str) -> None:
    with pytest.raises(InputError, match=f"^training.advantage is .*{sentence}") as caught:
        make_estimator(f"{OWN}:{name}")
    assert "\n" not in str(caught.value)
