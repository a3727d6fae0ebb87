"""Aggregation: the factor of each token's loss, so that the sum is the batch's loss."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import InputError
from millrace.training.objective import token_scale

LONGEST = 16
AGGREGATIONS = ("token_mean", "sequence_mean", "prompt_mean", "constant")
lengths = st.lists(st.integers(0, LONGEST), min_size=1, max_size=12).filter(any)


def scales(aggregation: str, lengths: list[int], groups: list[int] | None = None) -> torch.Tensor:
    """Per response; without `groups`, two neighbours are a group."""
    groups = [number // 2 for number in range(len(lengths))] if groups is None else groups
    lengths_Q, groups_Q = torch.tensor(lengths, dtype=torch.int64), torch.tensor(groups, dtype=torch.int64)
    return token_scale(aggregation, lengths_Q, LONGEST, groups_Q)


def batch_loss(aggregation: str, losses: list[list[float]], groups: list[int] | None = None) -> float:
    """Σ scale · loss."""
    scale_Q = scales(aggregation, [len(response) for response in losses], groups)
    return sum(scale * loss for scale, response in zip(scale_Q.tolist(), losses, strict=True) for loss in response)


def test_the_batchs_loss_is_the_mean_of_its_aggregation() -> None:
    losses = [[1.0, 2.0, 3.0], [], [6.0]]
    assert batch_loss("token_mean", losses) == pytest.approx(12 / 4)
    assert batch_loss("sequence_mean", losses) == pytest.approx((2 + 6) / 2)
    assert batch_loss("constant", losses) == pytest.approx(12 / (3 * LONGEST))


def test_a_prompt_counts_as_much_as_another_and_in_it_every_token_does() -> None:
    losses = [[1.0, 2.0, 3.0], [6.0], [], [7.0, 9.0], []]
    assert batch_loss("prompt_mean", losses, [0, 2, 0, 2, 3]) == pytest.approx((6 / 3 + 22 / 3) / 2)


@given(lengths)
def test_a_loss_of_1_everywhere_has_mean_1(lengths: list[int]) -> None:
    ones = [[1.0] * length for length in lengths]
    assert batch_loss("token_mean", ones) == pytest.approx(1)
    assert batch_loss("sequence_mean", ones) == pytest.approx(1)
    assert batch_loss("prompt_mean", ones) == pytest.approx(1)
    assert batch_loss("constant", ones) == pytest.approx(sum(lengths) / (len(lengths) * LONGEST))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(lengths=lengths)
def test_scales_are_float64_and_0_exactly_where_there_is_no_token(aggregation: str, lengths: list[int]) -> None:
    scale_Q = scales(aggregation, lengths)
    assert scale_Q.dtype == torch.float64
    assert (scale_Q > 0).tolist() == [length > 0 for length in lengths]


@given(lengths)
def test_with_responses_of_one_length_the_means_are_one(lengths: list[int]) -> None:
    equal = [max(lengths) if length else 0 for length in lengths]
    torch.testing.assert_close(scales("token_mean", equal), scales("sequence_mean", equal))
    alone = list(range(len(lengths)))
    torch.testing.assert_close(scales("prompt_mean", equal, alone), scales("sequence_mean", equal))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_a_batch_without_a_token_that_carries_loss_is_refused(aggregation: str, lengths: list[int]) -> None:
    with pytest.raises(InputError):
        scales(aggregation, lengths)
