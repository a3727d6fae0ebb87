"""How tensors are cut into parcels."""

import torch
from support.broadcasting import PARCELS, tensors_of

from millrace.weights.collective import _parcels


def test_a_version_travels_in_as_many_parcels_as_these_tests_count_on() -> None:
    assert len(list(_parcels(tensors_of(0).values()))) == PARCELS


def test_parcels_hold_every_byte_once_and_cut_what_is_large() -> None:
    tensors = [torch.arange(n, dtype=torch.int64) for n in (1, 20_000_000, 0, 5, 100_000)]
    tensors += [torch.full((100_000,), i, dtype=torch.int64) for i in range(9)]
    parcels = list(_parcels(tensors))
    sizes = [sum(piece.numel() for piece in parcel) for parcel in parcels]
    assert sum(sizes) == sum(tensor.nbytes for tensor in tensors)
    assert max(sizes) <= 64 << 20
    for parcel in parcels:
        for piece in parcel:
            piece.zero_()
    assert not any(bool(tensor.any()) for tensor in tensors)
