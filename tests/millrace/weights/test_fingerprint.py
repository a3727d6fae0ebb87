"""The fingerprint of tensors that trainer ranks hash by parts."""

import pytest
import torch
from support.weights.direct_policies import POLICIES, shards

from millrace.errors import WeightsCorrupt
from millrace.weights.direct.relay import whole_fingerprint
from millrace.weights.fingerprint import fingerprint

SIZES = [(1, 1), (3, 1), (1, 2), (2, 2), (5, 3)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("policy", ["odd", "llama"])
def test_hashes_of_ranks_make_the_fingerprint_of_the_whole_tensors(policy: str, size: tuple[int, int]) -> None:
    layout, tensors = POLICIES[policy].layout(*size), POLICIES[policy].tensors(1)
    by_rank = [fingerprint(shards(tensors, layout, rank)).tensors for rank in range(layout.size)]
    whole = whole_fingerprint(layout, by_rank)
    assert whole.tensors.keys() == tensors.keys()
    whole.verify(tensors, "tensors")


def test_a_flipped_bit_and_swapped_parts_are_damage() -> None:
    layout, tensors = POLICIES["llama"].layout(2, 2), POLICIES["llama"].tensors(1)
    whole = whole_fingerprint(layout, [fingerprint(shards(tensors, layout, rank)).tensors for rank in range(4)])
    name = "model.layers.0.self_attn.o_proj.weight"
    flipped, swapped = tensors[name].clone(), torch.roll(tensors[name], len(tensors[name]) // 2, 0)
    flipped.view(torch.int32)[-1, -1] ^= 1
    for damaged in (flipped, swapped):
        with pytest.raises(WeightsCorrupt, match=f"{name}$"):
            whole.verify({**tensors, name: damaged}, "tensors")
