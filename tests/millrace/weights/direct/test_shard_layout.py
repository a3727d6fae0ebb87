"""Shards of trainer ranks, as torch divides them, and messages that cover every element once."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.weights.direct_policies import POLICIES

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


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("policy", ["odd", "llama"])
def test_messages_carry_each_element_once(policy: str, size: tuple[int, int], replicas: int) -> None:
    layout = replace(POLICIES[policy].layout(*size), replicas=replicas)
    in_replica = layout.size // replicas
    assert all(layout.boxes(rank) == layout.boxes(rank % in_replica) for rank in range(layout.size))
    sent = {spec.name: torch.zeros(spec.shape, dtype=torch.int64) for spec in layout.tensors}
    for message in layout.messages():
        assert layout.boxes(message.source)[message.spec.name] == message.box
        sent[message.spec.name][tuple(slice(begin, end) for begin, end in message.box)] += 1
    assert all(bool((counts == 1).all()) for counts in sent.values())
