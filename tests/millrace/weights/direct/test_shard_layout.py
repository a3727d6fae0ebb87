"""Shards of trainer ranks, as torch divides them, and messages that cover every element once."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.weights.direct_policies import POLICIES

from millrace.weights.direct import layout as layout_module
from millrace.weights.direct.layout import ShardLayout, TensorSpec

SIZES = [(1, 1), (3, 1), (1, 2), (2, 2), (5, 3)]


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 20), columns=st.integers(1, 20), data=st.integers(1, 7), tensor=st.integers(1, 4))
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_a_rank_holds_what_chunk_gives_it(dim: int | None, rows: int, columns: int, data: int, tensor: int) -> None:
    whole = torch.arange(rows * columns).view(rows, columns)
    layout = ShardLayout((TensorSpec("w", "int64", (rows, columns), dim),), data, tensor)
    for rank in range(layout.size):
        part: torch.Tensor | None = whole
        for along, parts, index in ((dim, tensor, rank % tensor), (0, data, rank // tensor)):
            if along is not None and part is not None:
                chunks = part.chunk(parts, along)
                part = chunks[index] if index < len(chunks) else None
        box = layout.boxes(rank).get("w")
        assert (box is None) == (part is None)
        if box is not None and part is not None:
            assert torch.equal(whole[tuple(slice(begin, end) for begin, end in box)], part)
            assert layout.nbytes(rank) == part.nbytes


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("policy", ["odd", "llama"])
def test_messages_carry_each_element_once_and_ranks_take_turns(
    policy: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_module, "MESSAGE_BYTES", 1000)
    layout = POLICIES[policy].layout(*size)
    sent = {spec.name: torch.zeros(spec.shape, dtype=torch.int64) for spec in layout.tensors}
    messages = layout.messages()
    for message in messages:
        assert 0 < message.nbytes <= 1000
        assert layout.boxes(message.source)[message.spec.name] == message.box
        part = sent[message.spec.name][tuple(slice(begin, end) for begin, end in message.box)]
        counts = part.flatten()
        counts[message.begin : message.end] += 1
        part.copy_(counts.view(part.shape))
    assert all(bool((counts == 1).all()) for counts in sent.values())
    # While all have something left, each rank is next in turn.
    counts_by_rank = Counter(message.source for message in messages)
    turns = sorted(counts_by_rank) * min(counts_by_rank.values())
    assert [message.source for message in messages[: len(turns)]] == turns


def test_a_layout_is_the_same_after_a_way_through_json() -> None:
    layout = POLICIES["llama"].layout(2, 2)
    assert ShardLayout.from_json(layout.to_json()) == layout
