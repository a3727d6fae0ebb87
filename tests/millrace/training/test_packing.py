"""Packing: each sample once, without its last token or padding, the token budget kept, tokens after their positions."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.training.batch import Microbatch, Sample
from millrace.training.packing import Unit, fill, microbatches, pack

lengths = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=20)
budgets = st.integers(1, 64)
ranks = st.integers(1, 5)


def sample(prompt: int, response: int, number: int = 0) -> Sample:
    """A sample of `prompt` + `response` tokens other than 0; `number` is its name, kept in the advantage."""
    return Sample(
        prompt_tokens=np.arange(1, prompt + 1, dtype=np.int32) + 100 * (number + 1),
        response_tokens=np.arange(51, 51 + response, dtype=np.int32) + 100 * (number + 1),
        rollout_logprobs=-np.arange(1, response + 1, dtype=np.float32) - number,
        loss_mask=(np.arange(response) % 3 != 1).astype(np.uint8),
        temperature=0.5 + number,
        advantage=float(number + 1),
        staleness=number % 4,
        max_new_tokens=response,
    )


def samples(shapes: list[tuple[int, int]]) -> list[Sample]:
    return [sample(prompt, response, number) for number, (prompt, response) in enumerate(shapes)]


def sequences(batch: Microbatch) -> list[np.ndarray]:
    """The token ids between two borders."""
    borders = batch.cu_seqlens_Q1.tolist()
    return [batch.input_ids_S[a:b].numpy() for a, b in pairwise(borders)]


@given(lengths, budgets, ranks)
def test_every_sample_is_in_exactly_one_microbatch_without_its_last_token_and_nothing_else_is(
    shapes: list[tuple[int, int]], max_tokens: int, num_ranks: int
) -> None:
    given_samples, seen = samples(shapes), []
    for batch in microbatches(given_samples, max_tokens, num_ranks):
        seen += batch.indices
        for index, tokens in zip(batch.indices, sequences(batch), strict=bool(batch.indices)):
            original = given_samples[index]
            np.testing.assert_array_equal(tokens, [*original.prompt_tokens, *original.response_tokens[:-1]])
    assert sorted(seen) == list(range(len(shapes)))


@given(lengths, budgets, ranks)
def test_no_microbatch_exceeds_the_token_budget_unless_it_is_a_single_sample(
    shapes: list[tuple[int, int]], max_tokens: int, num_ranks: int
) -> None:
    for batch in microbatches(samples(shapes), max_tokens, num_ranks):
        assert len(batch.input_ids_S) <= max_tokens or len(batch.indices) == 1


@given(lengths, budgets, ranks)
def test_all_ranks_get_as_many_and_spare_ranks_a_dummy_token(
    shapes: list[tuple[int, int]], max_tokens: int, num_ranks: int
) -> None:
    batches = microbatches(samples(shapes), max_tokens, num_ranks)
    assert len(batches) % num_ranks == 0
    idle = [batch for batch in batches if not batch.indices]
    assert len(idle) < num_ranks
    for batch in idle:
        assert (batch.input_ids_S.tolist(), batch.lengths, len(batch.targets_N)) == ([0], (1,), 0)
    for rank in range(num_ranks):
        own = microbatches(samples(shapes), max_tokens, num_ranks, rank=rank)
        assert [batch.indices for batch in own] == [batch.indices for batch in batches[rank::num_ranks]]


@given(lengths, budgets)
def test_a_response_token_is_predicted_from_the_position_before_it(
    shapes: list[tuple[int, int]], max_tokens: int
) -> None:
    for batch in microbatches(samples(shapes), max_tokens):
        chosen = [shapes[index] for index in batch.indices]
        before = [prompt + r - 1 for prompt, response in chosen for r in range(response)]
        assert batch.positions_S[batch.predicts_N].tolist() == before
        # The position that predicts a token is that of the token before it; the last one has none.
        has_next = batch.response_N.diff() == 0
        assert torch.equal(batch.input_ids_S[batch.predicts_N[1:]][has_next], batch.targets_N[:-1][has_next])


@given(lengths, budgets)
def test_what_is_known_of_a_token_lies_where_the_batch_says(shapes: list[tuple[int, int]], max_tokens: int) -> None:
    given_samples = samples(shapes)
    flat = {
        "rollout_logprobs_N": np.concatenate([item.rollout_logprobs for item in given_samples]),
        "targets_N": np.concatenate([item.response_tokens for item in given_samples]),
    }
    indices = np.repeat(np.arange(len(shapes)), [response for _, response in shapes])
    mask = np.concatenate([item.loss_mask for item in given_samples])
    for batch in microbatches(given_samples, max_tokens):
        at = batch.in_batch_N.numpy()
        for name, values in flat.items():
            np.testing.assert_array_equal(getattr(batch, name).numpy(), values[at], err_msg=name)
        np.testing.assert_array_equal(batch.trainable_L.numpy(), np.flatnonzero(mask[at]))
        np.testing.assert_array_equal(np.array(batch.indices)[batch.response_N.numpy()], indices[at])
        for name in ("advantage", "temperature", "staleness"):
            expected = np.array([getattr(item, name) for item in given_samples])[indices[at]]
            values_N = batch.staleness_N if name == "staleness" else getattr(batch, f"{name}s_N")
            np.testing.assert_array_equal(values_N.numpy(), expected, err_msg=name)


@given(lengths, budgets, st.data())
def test_what_a_token_was_drawn_from_stays_with_it(
    shapes: list[tuple[int, int]], max_tokens: int, data: st.DataObject
) -> None:
    sets = [data.draw(st.none() | st.lists(st.sets(st.integers(0, 9)), min_size=r, max_size=r)) for _, r in shapes]
    truncated = [
        item
        if kept is None
        else replace(
            item,
            kept_tokens=np.array([token for ids in kept for token in sorted(ids)], np.int32),
            kept_counts=np.array([len(ids) for ids in kept], np.int32),
        )
        for item, kept in zip(samples(shapes), sets, strict=True)
    ]
    # Of a response that was not truncated, every token has the whole vocabulary: a count of 0.
    flat = [set() if kept is None else kept[r] for (_, n), kept in zip(shapes, sets, strict=True) for r in range(n)]
    for batch in microbatches(truncated, max_tokens):
        if all(sets[index] is None for index in batch.indices):
            assert batch.kept is None
            continue
        assert batch.kept is not None
        assert batch.kept.tokens_K.dtype == batch.kept.counts_N.dtype == torch.int64
        assert batch.kept.sizes_N.tolist() == batch.kept.counts_N.tolist()
        kept = batch.kept.tokens_K.split(batch.kept.counts_N.tolist())
        assert [set(ids.tolist()) for ids in kept] == [flat[n] for n in batch.in_batch_N.tolist()]


@given(lengths, budgets)
def test_responses_follow_each_other_and_lengths_ascend(shapes: list[tuple[int, int]], max_tokens: int) -> None:
    for batch in microbatches(samples(shapes), max_tokens):
        assert (batch.response_N.diff() >= 0).all()
        assert list(batch.lengths) == sorted(batch.lengths) == batch.cu_seqlens_Q1.diff().tolist()
        assert torch.equal(batch.positions_S, torch.cat([torch.arange(length) for length in batch.lengths]))


def test_the_split_does_not_depend_on_the_order_of_samples_of_different_lengths() -> None:
    shapes = [(2, n) for n in (5, 1, 4, 2, 3)]
    forwards, backwards = microbatches(samples(shapes), 12), microbatches(samples(shapes)[::-1], 12)
    assert len(forwards) > 1
    assert [batch.lengths for batch in forwards] == [batch.lengths for batch in backwards]
    assert [batch.indices for batch in forwards] == [tuple(4 - index for index in batch.indices) for batch in backwards]


def test_a_microbatch_goes_to_a_device_with_all_its_tensors() -> None:
    moved = pack(sample(3, 4)).to(torch.device("meta"))
    tensors = [getattr(moved, name) for name in Microbatch.__slots__]
    devices = {item.device.type for item in tensors if isinstance(item, torch.Tensor)}
    assert devices == {"meta"}
    assert (moved.lengths, moved.indices) == ((6,), (0,))


HIDDEN = 8
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def alone(lengths: Sequence[int]) -> list[Unit]:
    return [Unit(length, length * (length + 1) // 2, [index]) for index, length in enumerate(lengths)]


def first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> int:
    """Bins of the textbook's algorithm."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = next((number for number, left in enumerate(room) if left >= length), None)
        if at is None:
            room.append(max_tokens - length)
        else:
            room[at] -= length
    return len(room)


def cost(lengths: Sequence[int], indices: Sequence[int], hidden: int = HIDDEN) -> float:
    """Tokens, and pairs of a token and a token that attends to it."""
    return sum(lengths[index] + lengths[index] * (lengths[index] + 1) / 2 / (6 * hidden) for index in indices)


@settings(max_examples=100)
@given(lengths=sizes, max_tokens=st.integers(1, 200), ranks=st.integers(1, 5))
def test_there_are_as_many_microbatches_as_first_fit_decreasing_makes(
    lengths: list[int], max_tokens: int, ranks: int
) -> None:
    batches = fill(alone(lengths), max_tokens, ranks, HIDDEN)
    fewest = first_fit_decreasing(lengths, max_tokens)
    assert len(batches) == -(-fewest // ranks) * ranks
    assert sorted(index for indices in batches for index in indices) == list(range(len(lengths)))
    for indices in batches:
        assert sum(lengths[index] for index in indices) <= max_tokens or len(indices) == 1


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=60), ranks=st.integers(1, 6))
def test_ranks_differ_by_less_than_the_costliest_sample(lengths: list[int], ranks: int) -> None:
    costs = [cost(lengths, indices) for indices in fill(alone(lengths), sum(lengths), ranks, HIDDEN)]
    assert len(costs) == ranks
    assert max(costs) - min(costs) <= max(cost(lengths, [index]) for index in range(len(lengths))) + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_in_each_round_the_ranks_have_nearly_equal_work(seed: int) -> None:
    drawn = random.Random(seed)
    lengths = [min(4000, int(drawn.lognormvariate(6, 0.8)) + 1) for _ in range(1024)]
    ranks = 8
    costs = [cost(lengths, indices, 256) for indices in fill(alone(lengths), 16_384, ranks, 256)]
    waits = sum(max(costs[first : first + ranks]) for first in range(0, len(costs), ranks))
    assert waits < 1.02 * fmean(costs) * len(costs) / ranks


def test_long_samples_are_spread_by_what_their_attention_costs() -> None:
    # Eight of 100 tokens cost as much as one of 800, but for attention.
    units = alone([800] + [100] * 8 + [1])
    by_tokens, by_cost = fill(units, 10_000, 2), fill(units, 10_000, 2, HIDDEN)
    assert sorted(len(indices) for indices in by_tokens) == [2, 8]
    assert sorted(len(indices) for indices in by_cost) == [1, 9]
