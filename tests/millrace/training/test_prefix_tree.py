"""Prefix trees: each sequence can be read back, attends to its earlier tokens, and shares common prefixes."""

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from millrace.training.prefix_tree import LEAST_TOKENS, Layout, lay_out, saves_enough

Tokens = npt.NDArray[np.int32]


@st.composite
def forests(draw: st.DrawFn) -> list[Tokens]:
    """Sequences that grow from each other: each begins with some of an earlier one, or with all of it."""
    made: list[list[int]] = []
    for _ in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from(made)) if made and draw(st.integers(0, 4)) else []
        kept = draw(st.integers(0, len(parent)))
        suffix = draw(st.lists(st.integers(0, 3), max_size=6)) * draw(st.sampled_from([1, 8]))
        made.append([*parent[:kept], *suffix] or [0])
    return [np.array(sequence, dtype=np.int32) for sequence in made]


def read_back(layout: Layout, sequences: list[Tokens]) -> list[tuple[list[int], Tokens]]:
    """Each sequence with the positions of its tokens."""
    ends = np.cumsum([len(sequence) for sequence in sequences])
    return list(zip([part.tolist() for part in np.split(layout.where, ends[:-1])], sequences, strict=True))


def group(prompt: int, responses: list[int], first: int = 0) -> list[Tokens]:
    """Sequences of one prompt whose responses differ from their first token on."""
    return [
        np.concatenate([np.arange(prompt) + first, np.full(length, 1000 + number)]).astype(np.int32)
        for number, length in enumerate(responses)
    ]


@given(forests(), st.booleans())
def test_every_token_stands_where_its_sequence_says_and_no_position_is_left_over(
    sequences: list[Tokens], share: bool
) -> None:
    layout, tokens = lay_out(sequences, share=share), {}
    for where, sequence in read_back(layout, sequences):
        assert layout.positions_S[where].tolist() == list(range(len(sequence)))
        for position, token in zip(where, sequence.tolist(), strict=True):
            assert tokens.setdefault(position, token) == token
    assert sorted(tokens) == list(range(len(layout.positions_S)))
    assert sum(layout.lengths) == len(layout.positions_S)


@given(forests(), st.booleans())
def test_each_token_sees_the_tokens_before_it_in_its_sequence(sequences: list[Tokens], share: bool) -> None:
    layout = lay_out(sequences, share=share)
    starts, key_starts = np.cumsum([0, *layout.lengths]), np.cumsum([0, *layout.key_lengths])
    keys_T = np.arange(starts[-1]) if layout.keys_T is None else layout.keys_T
    assert list(layout.key_lengths) == sorted(layout.key_lengths)
    assert len(keys_T) == key_starts[-1]
    for where, _ in read_back(layout, sequences):
        for index, position in enumerate(where):
            segment = int(np.searchsorted(starts, position, side="right")) - 1
            seen = keys_T[key_starts[segment] : key_starts[segment + 1]]
            behind = starts[segment + 1] - 1 - position
            assert seen[: len(seen) - behind].tolist() == where[: index + 1]


def test_the_prompt_of_a_group_stands_once() -> None:
    layout = lay_out([*group(50, [3, 5, 1]), *group(40, [2, 2, 2], first=500)])
    assert sorted(zip(layout.lengths, layout.key_lengths, strict=True)) == [
        *[(1, 51), *[(2, 42)] * 3, (3, 53), (5, 55)],
        *[(40, 40), (50, 50)],
    ]


def test_any_common_beginning_stands_once() -> None:
    system = np.arange(100, dtype=np.int32)
    turn = np.full(30, 77, dtype=np.int32)
    first = [np.concatenate([system, prompt]) for prompt in group(20, [4, 4], first=200)]
    other = [
        np.concatenate([system, group(20, [0], first=300)[0], turn, suffix]) for suffix in group(3, [5, 5], first=400)
    ]
    layout = lay_out([*first, *other])
    assert len(layout.positions_S) == 100 + (20 + 4 + 4) + (20 + 30 + 3 + 5 + 5)


def test_a_sequence_that_another_one_begins_with_and_a_repeated_one_cost_nothing() -> None:
    long = np.arange(60, dtype=np.int32)
    assert len(lay_out([long, long[:40], long, long[:40]]).positions_S) == 60


def test_a_segment_that_saves_few_tokens_is_not_shared() -> None:
    few, enough = LEAST_TOKENS - 1, LEAST_TOKENS
    assert lay_out(group(few, [3, 3])).keys_T is None
    assert len(lay_out(group(enough, [3, 3])).positions_S) == enough + 6


def test_what_saves_less_than_a_tenth_of_a_batch_is_not_worth_it() -> None:
    assert saves_enough(group(60, [300] * 8), saved=0), "all begin with the same 60 tokens"
    assert not saves_enough(group(20, [300] * 8), saved=0)
    assert not saves_enough([*group(60, [300] * 8), *group(60, [300] * 8, first=100)], saved=0)
    assert saves_enough([*group(60, [300] * 8), *group(60, [300] * 8, first=100)], saved=2 * 7 * 60)
    assert not saves_enough(group(60, [300]), saved=0)


def test_tokens_that_different_experts_computed_are_different() -> None:
    tokens = np.arange(64, dtype=np.int32)
    experts = np.stack([np.repeat([[1, 2]], 64, axis=0), np.repeat([[1, 3]], 64, axis=0)])
    same, differing = (
        [np.column_stack([tokens, experts[i]]).astype(np.int32) for i in chosen] for chosen in ([0, 0], [0, 1])
    )
    assert len(lay_out(same).positions_S) == 64
    assert len(lay_out(differing).positions_S) == 128
