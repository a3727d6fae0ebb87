"""Which part of each tensor a trainer rank holds, and the messages in which the parts travel.

                tensor_rank 0      tensor_rank 1
  data_rank 0 │ columns 0, rows 0 │ columns 1, rows 0     rank = data_rank · tensor + tensor_rank
  data_rank 1 │ columns 0, rows 1 │ columns 1, rows 1

FSDP2 shards over data ranks what tensor parallelism gave the rank. Both divide like `torch.chunk`: each part is as long
as the first, but the last ones may be shorter or empty. Replicas follow each other, each with such ranks. Generators
take the model whole, so one list of messages serves them all: each part is one message, and a part that several ranks
hold is sent by one of them.
"""

import math
from dataclasses import dataclass

from millrace.weights.fingerprint import Region


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as the generators know it. Tied tensors have one name."""

    name: str
    dtype: str
    """`float32`, `bfloat16`, …"""
    shape: tuple[int, ...]
    tensor_dim: int | None = None
    """Dimension that tensor parallelism divides; None: every tensor rank of a data rank holds the same."""


@dataclass(frozen=True, slots=True)
class Message:
    """One rank's part of a tensor, in row-major order."""

    source: int
    """The trainer rank that sends it."""
    spec: TensorSpec
    box: Region


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The trainer's `replicas` · `data` · `tensor` ranks and the tensors that those of each replica divide."""

    tensors: tuple[TensorSpec, ...]
    data: int
    tensor: int = 1
    replicas: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.replicas * self.data * self.tensor

    def boxes(self, rank: int) -> dict[str, Region]:
        """A rank's part of each tensor, without empty parts."""
        parts = {spec.name: self._box(spec, rank) for spec in self.tensors}
        return {name: box for name, box in parts.items() if _volume(box)}

    def messages(self) -> list[Message]:
        """All messages of a push, in the one order in which every member sends and receives them."""
        messages = []
        for number, spec in enumerate(self.tensors):
            holders: dict[Region, list[int]] = {}
            for rank in range(self.size):
                holders.setdefault(self._box(spec, rank), []).append(rank)
            for box, ranks in holders.items():
                if _volume(box):
                    messages.append(Message(ranks[number % len(ranks)], spec, box))
        return messages

    def _box(self, spec: TensorSpec, rank: int) -> Region:
        box: Region = tuple((0, extent) for extent in spec.shape)
        if spec.tensor_dim is not None:
            box = _chunk(box, spec.tensor_dim, self.tensor, rank % self.tensor)
        # A tensor without dimensions is whole on every rank.
        return _chunk(box, 0, self.data, rank // self.tensor % self.data) if box else box


def _volume(region: Region) -> int:
    """Number of elements; 1 for ()."""
    return math.prod(end - begin for begin, end in region)


def _chunk(region: Region, dim: int, parts: int, index: int) -> Region:
    """Part `index` of a box that `torch.chunk` divides into `parts` along a dimension; it may be empty."""
    begin, end = region[dim]
    length = -(-(end - begin) // parts)
    part = (min(begin + index * length, end), min(begin + (index + 1) * length, end))
    return (*region[:dim], part, *region[dim + 1 :])
