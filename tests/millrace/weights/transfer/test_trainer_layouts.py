"""The layout of the trainer's ranks is that of FSDP2 and of DTensor."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from millrace.weights.transfer.layout import TensorSpec
from millrace.weights.transfer.trainer_layouts import fsdp_layout

_NAME = "weight"


def _held(shape: tuple[int, ...], *, data: int, tensor: int = 1, dim: int | None = None) -> list:
    layout = fsdp_layout([TensorSpec(_NAME, "float32", shape)], data=data, tensor=tensor, tensor_dims={_NAME: dim})
    return [layout.held(rank).get(_NAME) for rank in range(layout.size)]


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 30), columns=st.integers(1, 8), data=st.integers(1, 7), tensor=st.integers(1, 4))
def test_tensors_divided_by_columns_are_where_dtensor_puts_them(
    rows: int, columns: int, data: int, tensor: int
) -> None:
    held = _held((rows, columns), data=data, tensor=tensor, dim=1)
    for rank, box in enumerate(held):
        place = [rank // tensor, rank % tensor]
        shape, offset = _compute_local_shape_and_global_offset(
            (rows, columns), (data, tensor), place, [Shard(0), Shard(1)]
        )
        if 0 in shape:
            assert box is None
        else:
            assert box == tuple((begin, begin + extent) for begin, extent in zip(offset, shape, strict=True))


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 30), data=st.integers(1, 7), tensor=st.integers(1, 4))
def test_rows_are_divided_among_tensor_ranks_and_each_part_among_data_ranks(rows: int, data: int, tensor: int) -> None:
    held = _held((rows,), data=data, tensor=tensor, dim=0)
    parts = torch.arange(rows).chunk(tensor)
    for rank, box in enumerate(held):
        part = parts[rank % tensor] if rank % tensor < len(parts) else torch.arange(0)
        shards = part.chunk(data)
        mine = shards[rank // tensor].tolist() if rank // tensor < len(shards) else []
        assert list(range(*box[0]) if box else []) == mine


def test_a_replicated_tensor_is_held_by_every_tensor_rank() -> None:
    held = _held((4, 2), data=2, tensor=2)
    assert held == [((0, 2), (0, 2))] * 2 + [((2, 4), (0, 2))] * 2
    assert _compute_local_shape_and_global_offset((4, 2), (2, 2), [1, 0], [Shard(0), Replicate()]) == ((2, 2), (2, 0))


def test_a_tensor_without_dimensions_is_whole_on_every_rank() -> None:
    assert _held((), data=2, tensor=2) == [()] * 4


def test_ranks_beyond_the_last_row_hold_nothing() -> None:
    assert _held((3,), data=4) == [((0, 1),), ((1, 2),), ((2, 3),), None]
    assert _held((5,), data=4) == [((0, 2),), ((2, 4),), ((4, 5),), None]
