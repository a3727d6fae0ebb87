"""The cache-validity probe: which tokens, how two answers are compared, and how much rounding may do."""

import math

import pytest

from millrace.weights.base import Probe
from millrace.weights.probe import MOST_TOKENS, largest_difference, probe_tokens, tolerance_between


def test_the_tokens_are_the_prompt_over_and_over_as_long_as_a_trajectory_gets_before_its_last_token() -> None:
    assert probe_tokens([1, 5, 6], max_new_tokens=6) == (1, 5, 6, 1, 5, 6, 1, 5)
    assert probe_tokens((1, 5, 6), max_new_tokens=1) == (1, 5, 6)


@pytest.mark.parametrize("prompt_length", [1, 7, 255, 256, 257, 1000])
def test_they_are_never_more_than_256(prompt_length: int) -> None:
    tokens = probe_tokens(range(prompt_length), max_new_tokens=10_000)
    assert len(tokens) == MOST_TOKENS == 256
    assert tokens[: min(prompt_length, 256)] == tuple(range(min(prompt_length, 256)))


def test_the_largest_difference_is_named_with_its_token_and_both_numbers() -> None:
    expected = Probe(tokens=(1,), logprobs={3: -0.5, 4: -1.5, 5: -2.0})
    difference, numbers = largest_difference(expected, {3: -0.51, 4: -1.25, 5: -2.0})
    assert difference == pytest.approx(0.25)
    assert numbers == "token 4: -1.25000 against the trainer's -1.50000"


def test_tokens_that_only_one_of_them_names_do_not_count() -> None:
    expected = Probe(tokens=(1,), logprobs={3: -0.5, 4: -9.0})
    assert largest_difference(expected, {3: -0.5, 7: -8.9})[0] == 0.0


def test_no_token_in_common_is_an_infinite_difference() -> None:
    expected = Probe(tokens=(1,), logprobs={4: -0.5, 3: -0.7})
    difference, numbers = largest_difference(expected, {8: -0.5, 7: -0.7})
    assert difference == math.inf
    assert numbers == "the likeliest next tokens are [7, 8] against [3, 4]"


@pytest.mark.parametrize(
    ("trainer", "generator", "tolerance"),
    [
        ("float32", "float32", 1e-3),
        ("bfloat16", "bfloat16", 0.1),
        ("float32", "bfloat16", 0.1),
        ("bfloat16", "float32", 0.1),
    ],
)
def test_rounding_alone_may_do_little_where_both_compute_in_float32(
    trainer: str, generator: str, tolerance: float
) -> None:
    assert tolerance_between(trainer, generator) == tolerance
