"""Lays out sequences that share prefixes so that each shared prefix is stored once.

    a b c d e          ┌─ d e       segments   a b c │ d e │ f │ g h        S positions, segments end to end
    a b c f      a b c ┼─ f         positions  0 1 2 │ 3 4 │ 3 │ 3 4        as in each sequence
    a b c g h          └─ g h       a token sees its own segment up to itself, and all segments on the way to it

Hidden states of the tokens in common are the same in each sequence, so nothing is lost (Prefix Grouper, arXiv
2506.05433, for the prompt of a group). Here any beginning counts: a prompt, the system prompt before it, the first
turns of a conversation. A sequence that shares nothing is one segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_LEAST_SHARE = 0.1
"""Share of a batch's tokens that has to be saved: masks and copies of keys cost a few per cent of a step."""
LEAST_TOKENS = 16
"""Minimum number of tokens that a shared segment saves: each segment costs separate calls."""

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Position of each token of some sequences. Segments ascend by the number of keys they see, then by length."""

    where: _Ints
    """[tokens of all sequences] position of each token, sequence after sequence."""
    positions_S: _Ints
    """[S] index in its sequence of the token at each position."""
    lengths: tuple[int, ...]
    """[Q] tokens of each segment."""
    key_lengths: tuple[int, ...]
    """[Q] tokens that the last token of each segment sees: those of the segment and of all on the way to it."""
    keys_T: _Ints | None
    """[T] the positions that segments see, segment after segment; None if each sees itself alone."""


class _Node(NamedTuple):
    """A shared segment: tokens `begin` to `end` of its sequences, behind those of the node `parent`; -1 for a root."""

    begin: int
    end: int
    parent: int


def lay_out(sequences: Sequence[npt.NDArray[np.int32]], *, share: bool = True) -> Layout:
    """Lays out sequences of tokens, [L] or [L, any]: two tokens are the same if all their numbers are.

    `share`: whether shared prefixes are stored once. The same sequences always give the same layout.
    """
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    nodes: list[_Node] = []
    begins, parents = np.zeros_like(lengths), np.full_like(lengths, -1)
    if share and len(sequences) > 1:
        nodes = _grow(sequences, lengths, begins, parents)
    # Segments: the shared ones, then one per sequence, which may be empty.
    sizes = np.array([*(node.end - node.begin for node in nodes), *(lengths - begins)], dtype=np.int64)
    seen = np.array([*(node.end for node in nodes), *lengths], dtype=np.int64)
    order = np.lexsort((sizes, seen))
    order = order[sizes[order] > 0]
    starts = np.zeros_like(sizes)
    starts[order] = np.cumsum(sizes[order]) - sizes[order]
    ways: list[_Ints] = []
    for node, start in zip(nodes, starts.tolist(), strict=False):
        segment = np.arange(start, start + node.end - node.begin)
        ways.append(np.concatenate([ways[node.parent], segment]) if node.parent >= 0 else segment)
    index, sequence_starts = counts(lengths), starts[len(nodes) :]
    where = index + np.repeat(sequence_starts - begins, lengths)
    keys_T = None
    if nodes:
        is_shared = index < np.repeat(begins, lengths)
        where[is_shared] = np.concatenate([ways[parent] for parent in parents if parent >= 0])
        of_sequences = [where[start:end] for start, end in pairwise([0, *np.cumsum(lengths).tolist()])]
        seen_by = [*ways, *of_sequences]
        keys_T = np.concatenate([seen_by[segment] for segment in order.tolist()])
    positions_S = np.empty(int(sizes.sum()), dtype=np.int64)
    positions_S[where] = index
    return Layout(
        where=where,
        positions_S=positions_S,
        lengths=tuple(sizes[order].tolist()),
        key_lengths=tuple(seen[order].tolist()),
        keys_T=keys_T,
    )


def saves_enough(sequences: Sequence[npt.NDArray[np.int32]], saved: int) -> bool:
    """Whether sharing pays: `saved` tokens, or the prefix of all sequences, are at least a tenth of all tokens."""
    if len(sequences) < 2:
        return False
    # In sorted order, the first and the last sequence share exactly the prefix that all share.
    keys = [sequence.tobytes() for sequence in sequences]
    first, last = (sequences[keys.index(key)] for key in (min(keys), max(keys)))
    common = int(_common_with_next([first, last])[0]) * (len(sequences) - 1)
    return max(saved, common) >= max(LEAST_TOKENS, _LEAST_SHARE * sum(len(sequence) for sequence in sequences))


def _grow(sequences: Sequence[npt.NDArray[np.int32]], lengths: _Ints, begins: _Ints, parents: _Ints) -> list[_Node]:
    """The shared segments, parents first. Sets `begins`, the tokens of each sequence in them, and `parents`."""
    # In sorted order sequences with a shared prefix are neighbours. Big-endian bytes sort like their numbers.
    keys = [np.ascontiguousarray(sequence, dtype=">i4").tobytes() for sequence in sequences]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    common = _common_with_next([sequences[i] for i in order])
    nodes: list[_Node] = []
    # Runs low to high of neighbours that agree on more than `begin` tokens, which are those before and of `parent`.
    left = [(0, len(order), 0, -1)]
    while left:
        low, high, begin, parent = left.pop()
        inner, repeats = common[low : high - 1], high - low - 1
        end, most_saved = int(inner.min()), int(inner.sum())
        if (end - begin) * repeats >= LEAST_TOKENS:
            nodes.append(_Node(begin=begin, end=end, parent=parent))
            begin, parent = end, len(nodes) - 1
        begins[order[low:high]], parents[order[low:high]] = begin, parent
        if most_saved - begin * repeats >= LEAST_TOKENS:
            borders = [low, *(low + 1 + np.flatnonzero(inner == end)).tolist(), high]
            left += [(a, b, begin, parent) for a, b in pairwise(borders) if b > a + 1]
    return nodes


def _common_with_next(ordered: Sequence[npt.NDArray[np.int32]]) -> _Ints:
    """[sequences - 1] length of the prefix that each sequence shares with the next."""
    flat = np.concatenate(ordered)
    lengths = np.array([len(sequence) for sequence in ordered], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    shorter = np.minimum(lengths[:-1], lengths[1:])
    ends = np.cumsum(shorter)
    index = counts(shorter)
    same = flat[np.repeat(starts[:-1], shorter) + index] == flat[np.repeat(starts[1:], shorter) + index]
    differ = np.flatnonzero(~same.reshape(len(same), -1).all(axis=1))
    first = np.append(differ, len(same))[np.searchsorted(differ, ends - shorter)]
    common: _Ints = np.minimum(first - (ends - shorter), shorter)
    return common


def counts(lengths: _Ints) -> _Ints:
    """0, 1, … below each of the `lengths`, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
