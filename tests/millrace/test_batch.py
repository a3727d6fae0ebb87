"""Packing: every sample once, padding silent, the token budget kept, each position speaking of the token after it."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.batch import Microbatch, Sample, microbatches

lengths = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=20)


def sample(prompt: int, response: int, number: int = 0) -> Sample:
    """A sample of `prompt` + `response` tokens none of which is 0; `number` is its name, kept in the advantage."""
    return Sample(
        prompt_tokens=np.arange(1, prompt + 1, dtype=np.int32) + 100 * (number + 1),
        response_tokens=np.arange(51, 51 + response, dtype=np.int32) + 100 * (number + 1),
        rollout_logprobs=-np.arange(1, response + 1, dtype=np.float32) - number,
        loss_mask=(np.arange(response) % 3 != 1).astype(np.uint8),
        temperature=0.5 + number,
        advantage=float(number + 1),
    )


def samples(shapes: list[tuple[int, int]]) -> list[Sample]:
    return [sample(prompt, response, number) for number, (prompt, response) in enumerate(shapes)]


def names(batch: Microbatch) -> list[int]:
    return [round(advantage) - 1 for advantage in batch.advantages_BT[:, 0].tolist()]


@given(lengths, st.integers(1, 64))
def test_every_sample_is_in_exactly_one_microbatch_unharmed(shapes: list[tuple[int, int]], max_tokens: int) -> None:
    given_samples, seen = samples(shapes), []
    for batch in microbatches(given_samples, max_tokens):
        for row, number in enumerate(names(batch)):
            seen.append(number)
            original = given_samples[number]
            tokens = np.concatenate([original.prompt_tokens, original.response_tokens])
            real = batch.attention_mask_BS[row].bool()
            np.testing.assert_array_equal(batch.input_ids_BS[row][real].numpy(), tokens)
            assert batch.temperatures_B11[row].item() == original.temperature
            assert (batch.advantages_BT[row] == original.advantage).all()
    assert sorted(seen) == list(range(len(shapes)))


@given(lengths, st.integers(1, 64))
def test_no_microbatch_exceeds_the_token_budget_unless_it_is_a_single_sample(
    shapes: list[tuple[int, int]], max_tokens: int
) -> None:
    for batch in microbatches(samples(shapes), max_tokens):
        assert batch.input_ids_BS.numel() <= max_tokens or len(batch.input_ids_BS) == 1


@given(lengths, st.integers(1, 64))
def test_no_two_neighbouring_microbatches_would_fit_into_one(shapes: list[tuple[int, int]], max_tokens: int) -> None:
    for shorter, longer in pairwise(microbatches(samples(shapes), max_tokens)):
        assert (len(shorter.input_ids_BS) + len(longer.input_ids_BS)) * longer.input_ids_BS.shape[1] > max_tokens


@given(lengths, st.integers(1, 64))
def test_padding_is_on_the_right_and_carries_no_loss(shapes: list[tuple[int, int]], max_tokens: int) -> None:
    for batch in microbatches(samples(shapes), max_tokens):
        width = batch.input_ids_BS.shape[1]
        num_tokens_B1 = batch.attention_mask_BS.sum(dim=1, keepdim=True)
        padding_BS = torch.arange(width) >= num_tokens_B1
        assert torch.equal(padding_BS, batch.attention_mask_BS == 0)
        assert num_tokens_B1.max() == width
        padding_BT = padding_BS[:, 1:]
        assert not batch.loss_mask_BT[padding_BT].any()
        assert not batch.rollout_logprobs_BT[padding_BT].any()


@given(lengths, st.integers(1, 64))
def test_position_t_speaks_of_the_token_at_t_plus_1(shapes: list[tuple[int, int]], max_tokens: int) -> None:
    given_samples = samples(shapes)
    for batch in microbatches(given_samples, max_tokens):
        for row, number in enumerate(names(batch)):
            original = given_samples[number]
            for r, token in enumerate(original.response_tokens):
                t = len(original.prompt_tokens) + r - 1
                assert batch.input_ids_BS[row, t + 1] == token
                assert batch.rollout_logprobs_BT[row, t] == original.rollout_logprobs[r]
                assert batch.loss_mask_BT[row, t] == original.loss_mask[r]
            assert not batch.loss_mask_BT[row, : len(original.prompt_tokens) - 1].any()


def test_the_split_does_not_depend_on_the_order_of_samples_of_different_lengths() -> None:
    shapes = [(2, n) for n in (5, 1, 4, 2, 3)]
    forwards, backwards = microbatches(samples(shapes), 16), microbatches(samples(shapes)[::-1], 16)
    assert len(forwards) > 1
    assert [names(batch) for batch in forwards] == [names(batch) for batch in backwards]


def test_a_sample_is_as_long_as_its_prompt_and_response_together() -> None:
    assert sample(3, 4).num_tokens == 7


@pytest.mark.parametrize("name", ["loss_mask_BT", "rollout_logprobs_BT", "advantages_BT", "temperatures_B11"])
def test_what_enters_the_loss_is_float32(name: str) -> None:
    (batch,) = microbatches([sample(2, 2), sample(3, 3, 1)], 100)
    assert getattr(batch, name).dtype == torch.float32
    assert getattr(batch, name).shape == ((2, 1, 1) if name == "temperatures_B11" else (2, 5))


@given(lengths, st.integers(1, 64))
def test_every_microbatch_says_which_samples_it_holds_and_where_their_responses_are(
    shapes: list[tuple[int, int]], max_tokens: int
) -> None:
    given_samples = samples(shapes)
    for batch in microbatches(given_samples, max_tokens):
        assert list(batch.places) == names(batch)
        for row, (place, (start, end)) in enumerate(zip(batch.places, batch.response_spans, strict=True)):
            spoken_of = batch.input_ids_BS[row, 1:][start:end].numpy()
            np.testing.assert_array_equal(spoken_of, given_samples[place].response_tokens)
