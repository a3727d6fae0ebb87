"""Sums of boxes add up to the sum of the whole, and any damage changes them."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.weights.fingerprint import Region, add_sums, region_sums, whole_region

SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]


def sum_of(tensor: torch.Tensor, box: Region) -> int:
    part = tensor[tuple(slice(begin, end) for begin, end in box)]
    return region_sums({"a": part}, {"a": box}, {"a": tuple(tensor.shape)})["a"]


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), generator=random, dtype=torch.uint8).view(dtype).view(shape)


@settings(max_examples=80, deadline=None)
@given(shape=SHAPES, dtype=st.sampled_from(DTYPES), data=st.data())
def test_the_sums_of_any_division_add_up_to_that_of_the_whole(
    shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = made(shape, dtype)
    boxes = [whole_region(shape)]
    for dim in range(len(shape)):
        cut = data.draw(st.integers(0, shape[dim]))
        boxes = [
            (*box[:dim], part, *box[dim + 1 :]) for box in boxes for part in ((box[dim][0], cut), (cut, box[dim][1]))
        ]
    assert add_sums(sum_of(tensor, box) for box in boxes) == sum_of(tensor, whole_region(shape))


@pytest.mark.parametrize("columns", [64, 100])
def test_large_rows_are_summed_in_words_of_eight_bytes_with_the_same_rule(columns: int) -> None:
    tensor = made((6, columns), torch.float32)
    half = columns // 2
    parts = [((0, 6), (0, half)), ((0, 2), (half, columns)), ((2, 6), (half, columns))]
    assert add_sums(sum_of(tensor, box) for box in parts) == sum_of(tensor, whole_region((6, columns)))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_a_flipped_bit_swapped_elements_and_a_moved_box_have_other_sums(
    data: st.DataObject, dtype: torch.dtype
) -> None:
    shape = (4, 64)
    tensor = made(shape, dtype, seed=7)
    original = sum_of(tensor, whole_region(shape))
    flipped = tensor.clone()
    raw = flipped.view(-1).view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert sum_of(flipped, whole_region(shape)) != original
    (r, c), (s, d) = (data.draw(st.tuples(st.integers(0, 3), st.integers(0, 63))) for _ in range(2))
    swapped = tensor.clone()
    swapped[r, c], swapped[s, d] = tensor[s, d], tensor[r, c]
    if not torch.equal(swapped.view(torch.uint8), tensor.view(torch.uint8)):
        assert sum_of(swapped, whole_region(shape)) != original
    assert (
        sum_of(tensor, ((0, 2), (0, 64))) != region_sums({"a": tensor[:2]}, {"a": ((2, 4), (0, 64))}, {"a": shape})["a"]
    )


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 128), max_size=4), dtype=st.sampled_from(DTYPES))
def test_parts_that_cut_through_words_add_up_too(cuts: list[int], dtype: torch.dtype) -> None:
    tensor = made((3, 128), dtype)
    ends = sorted({0, 128, *cuts})
    parts = [((0, 3), columns) for columns in pairwise(ends)]
    assert add_sums(sum_of(tensor, box) for box in parts) == sum_of(tensor, whole_region((3, 128)))


def test_without_tensors_there_is_nothing_to_sum() -> None:
    assert region_sums({}, {}, {}) == {}
