"""What each trainer rank holds of the policy: FSDP2 over data ranks, of what tensor parallelism gave the rank.

                tensor_rank 0      tensor_rank 1
  data_rank 0 │ columns 0, rows 0 │ columns 1, rows 0     rank = data_rank · tensor + tensor_rank
  data_rank 1 │ columns 0, rows 1 │ columns 1, rows 1

Both divide like `torch.chunk`: each part is as long as the first, but the last ones may be shorter or empty.
"""

from collections.abc import Iterable, Mapping
from functools import cache

from millrace.weights.transfer.layout import Division, Layout, Region, TensorSpec, volume


def fsdp_layout(
    tensors: Iterable[TensorSpec], *, data: int, tensor: int = 1, tensor_dims: Mapping[str, int | None] | None = None
) -> Layout:
    """The layout of data · tensor ranks.

    `tensor_dims` says along which dimension tensor parallelism divides a tensor, by name. A tensor that is missing, or
    is None there, is replicated over the tensor ranks. Tensors without dimensions are whole on every rank.
    """
    tensors = tuple(tensors)
    dims = tensor_dims or {}

    @cache
    def divided(shape: tuple[int, ...], dim: int | None) -> Division:
        whole: Region = tuple((0, extent) for extent in shape)
        parts = [whole if dim is None else chunk(whole, dim, tensor, rank) for rank in range(tensor)]
        shards = (chunk(part, 0, data, rank) if shape else part for rank in range(data) for part in parts)
        return tuple(shard if volume(shard) else None for shard in shards)

    return Layout(tensors, tuple(divided(spec.shape, dims.get(spec.name)) for spec in tensors), data * tensor)


def chunk(region: Region, dim: int, parts: int, index: int) -> Region:
    """Part `index` of a box that `torch.chunk` divides into `parts` along a dimension; it may be empty."""
    begin, end = region[dim]
    length = -(-(end - begin) // parts)
    part = (min(begin + index * length, end), min(begin + (index + 1) * length, end))
    return (*region[:dim], part, *region[dim + 1 :])
