"""Aggregation: the factor of each token's loss, so that the sum is the batch's loss."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training.samples import make_sample

from configs.training import TrainingConfig
from millrace.errors import InputError
from millrace.training.objective import Objectives, token_scale

LONGEST = 16
AGGREGATIONS = ("token_mean", "sequence_mean", "prompt_mean", "constant")
lengths = st.lists(st.integers(0, LONGEST), min_size=1, max_size=12).filter(any)


def scales(aggregation: str, lengths: list[int], groups: list[int] | None = None) -> torch.Tensor:
    """Per response; without `groups`, two neighbours are a group."""
    groups = [number // 2 for number in range(len(lengths))] if groups is None else groups
    lengths_Q = torch.tensor(lengths)
    return token_scale(aggregation, lengths_Q, torch.full_like(lengths_Q, LONGEST), torch.tensor(groups))


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
        scales_of_batch(aggregation, [("default", [length]) for length in lengths])


Groups = list[tuple[str, list[int]]]
"""The source of each group, and the number of trainable tokens of each of its members."""
group_lengths = st.lists(st.integers(0, LONGEST), min_size=1, max_size=4)
batches = st.lists(st.tuples(st.sampled_from("abc"), group_lengths), min_size=1, max_size=8).filter(
    lambda groups: any(sum(of_group) for _, of_group in groups)
)


def scales_of_batch(aggregation: str, groups: Groups, longest: dict[str, int] | None = None) -> torch.Tensor:
    """Per response of all groups."""
    training = TrainingConfig.model_validate({"max_steps": 1, "aggregation": aggregation})
    samples = [
        make_sample(
            [1],
            [2] * max(1, length),
            loss_mask=int(length > 0),
            source=source,
            group=number,
            max_new_tokens=(longest or {}).get(source, LONGEST),
        )
        for number, (source, of_group) in enumerate(groups)
        for length in of_group
    ]
    return Objectives(training, {}).scale(samples, range(len(samples)))


def loss_of(source: str, groups: Groups, scale_Q: torch.Tensor) -> float:
    """The source's part of the batch's loss, if that of every token is 1."""
    responses = [(of, length) for of, of_group in groups for length in of_group]
    return sum(length * scale for (of, length), scale in zip(responses, scale_Q.tolist(), strict=True) if of == source)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean"])
@given(groups=batches)
def test_a_source_counts_by_its_groups_and_not_by_their_lengths_or_sizes(aggregation: str, groups: Groups) -> None:
    scale_Q = scales_of_batch(aggregation, groups)
    trainable = [source for source, of_group in groups if any(of_group)]
    for source in "abc":
        expected = trainable.count(source) / len(trainable)
        assert loss_of(source, groups, scale_Q) == pytest.approx(expected)


def test_responses_of_a_source_are_divided_by_the_longest_that_it_allows() -> None:
    groups: Groups = [("short", [4, 2]), ("long", [40, 20])]
    scale_Q = scales_of_batch("constant", groups, {"short": 8, "long": 80})
    assert loss_of("short", groups, scale_Q) == pytest.approx(loss_of("long", groups, scale_Q))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(groups=batches)
def test_one_source_has_the_scales_of_its_aggregation_bit_for_bit(aggregation: str, groups: Groups) -> None:
    alone = [("default", of_group) for _, of_group in groups]
    lengths = [length for _, of_group in groups for length in of_group]
    numbers = [number for number, (_, of_group) in enumerate(groups) for _ in of_group]
    assert scales_of_batch(aggregation, alone).tolist() == scales(aggregation, lengths, numbers).tolist()


@given(groups=batches)
def test_the_mean_over_prompts_does_not_depend_on_their_sources(groups: Groups) -> None:
    alone = [("default", of_group) for _, of_group in groups]
    torch.testing.assert_close(scales_of_batch("prompt_mean", groups), scales_of_batch("prompt_mean", alone))
