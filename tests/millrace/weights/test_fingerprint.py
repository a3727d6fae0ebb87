"""The fingerprint of tensors that trainer ranks hash by parts."""

import pytest
import torch
from support.weights.direct_policies import POLICIES, shards

from millrace.errors import WeightsCorrupt
from millrace.weights.direct.relay import whole_fingerprint
from millrace.weights.fingerprint import Method, fingerprint, hash_tensor

SIZES = [(1, 1), (3, 1), (1, 2), (2, 2), (5, 3)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("policy", "method"), [("odd", "xxh3"), ("llama", "xxh3"), ("odd", "sums")])
def test_hashes_of_ranks_make_the_fingerprint_of_the_whole_tensors(
    policy: str, method: Method, size: tuple[int, int]
) -> None:
    layout, tensors = POLICIES[policy].layout(*size), POLICIES[policy].tensors(1)
    by_rank = [fingerprint(shards(tensors, layout, rank), method=method).tensors for rank in range(layout.size)]
    whole = whole_fingerprint(layout, by_rank, method)
    assert whole.tensors.keys() == tensors.keys()
    whole.verify(tensors, "tensors")


@pytest.mark.parametrize("method", ["xxh3", "sums"])
def test_a_flipped_bit_and_swapped_parts_are_damage(method: Method) -> None:
    layout, tensors = POLICIES["llama"].layout(2, 2), POLICIES["llama"].tensors(1)
    by_rank = [fingerprint(shards(tensors, layout, rank), method=method).tensors for rank in range(4)]
    whole = whole_fingerprint(layout, by_rank, method)
    name = "model.layers.0.self_attn.o_proj.weight"
    flipped, swapped = tensors[name].clone(), torch.roll(tensors[name], len(tensors[name]) // 2, 0)
    flipped.view(torch.int32)[-1, -1] ^= 1
    for damaged in (flipped, swapped):
        with pytest.raises(WeightsCorrupt, match=f"{name}$"):
            whole.verify({**tensors, name: damaged}, "tensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_change_with_a_bit_with_two_swapped_values_and_with_the_dtype(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 13).view(3, 4).to(dtype)
    flipped, swapped = tensor.clone(), tensor.clone()
    flipped.view(torch.int8)[2, 1] ^= 1
    swapped[0, 0], swapped[2, 3] = tensor[2, 3], tensor[0, 0]
    others = [flipped, swapped, tensor.view(torch.int8), tensor.view(4, 3)]
    hashes = {hash_tensor(each, "sums") for each in (tensor, *others)}
    assert len(hashes) == 1 + len(others)
    assert hash_tensor(tensor.clone(), "sums") in hashes
