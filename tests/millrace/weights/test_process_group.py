"""How tensors are cut into chunks."""

import torch
from support.weights.broadcasting import CHUNKS, tensors_of

from millrace.weights.process_group import _chunks


def test_a_version_travels_in_as_many_chunks_as_these_tests_count_on() -> None:
    assert len(list(_chunks(tensors_of(0).values()))) == CHUNKS


def test_chunks_hold_every_byte_once_and_cut_what_is_large() -> None:
    tensors = [torch.arange(n, dtype=torch.int64) for n in (1, 20_000_000, 0, 5, 100_000)]
    tensors += [torch.full((100_000,), i, dtype=torch.int64) for i in range(9)]
    chunks = list(_chunks(tensors))
    sizes = [sum(piece.numel() for piece in chunk) for chunk in chunks]
    assert sum(sizes) == sum(tensor.nbytes for tensor in tensors)
    assert max(sizes) <= 64 << 20
    for chunk in chunks:
        for piece in chunk:
            piece.zero_()
    assert not any(bool(tensor.any()) for tensor in tensors)
