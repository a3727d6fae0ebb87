"""Which part of each tensor a trainer rank holds, and the messages in which the parts travel.

                tensor_rank 0      tensor_rank 1
  data_rank 0 │ columns 0, rows 0 │ columns 1, rows 0     rank = data_rank · tensor + tensor_rank
  data_rank 1 │ columns 0, rows 1 │ columns 1, rows 1

FSDP2 shards over data ranks what tensor parallelism gave the rank. Both divide like `torch.chunk`: each part is as long
as the first, but the last ones may be shorter or empty. Generators take the model whole, so one list of messages
serves them all: the ranks take turns, and a part that several ranks hold is sent by one of them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from typing import Any, Self

import torch

from millrace.weights.fingerprint import Region, whole_region

MESSAGE_BYTES = 32 << 20
"""The most that travels at once."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as the generators know it. Tied tensors have one name."""

    name: str
    dtype: str
    """`float32`, `bfloat16`, …"""
    shape: tuple[int, ...]
    tensor_dim: int | None = None
    """Dimension that tensor parallelism divides; None: every tensor rank of a data rank holds the same."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        size: int = getattr(torch, self.dtype).itemsize
        return size


@dataclass(frozen=True, slots=True)
class Message:
    """A run of elements of one rank's part of a tensor, in row-major order."""

    source: int
    """The trainer rank that sends it."""
    spec: TensorSpec
    box: Region
    """The rank's part."""
    begin: int
    end: int
    """Elements, counted in the box."""

    @property
    def nbytes(self) -> int:
        """Size."""
        return (self.end - self.begin) * self.spec.itemsize


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The trainer's `data` · `tensor` ranks and what they divide."""

    tensors: tuple[TensorSpec, ...]
    data: int
    tensor: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.tensor

    def boxes(self, rank: int) -> dict[str, Region]:
        """A rank's part of each tensor, without those that it has nothing of."""
        parts = {spec.name: self._box(spec, rank) for spec in self.tensors}
        return {name: box for name, box in parts.items() if volume(box)}

    def nbytes(self, rank: int) -> int:
        """Bytes of a rank's parts."""
        return sum(volume(self._box(spec, rank)) * spec.itemsize for spec in self.tensors)

    def messages(self) -> list[Message]:
        """All messages of a push, in the one order in which every member sends and receives them."""
        by_rank: list[list[Message]] = [[] for _ in range(self.size)]
        for number, spec in enumerate(self.tensors):
            holders: dict[Region, list[int]] = {}
            for rank in range(self.size):
                holders.setdefault(self._box(spec, rank), []).append(rank)
            for box, ranks in holders.items():
                source = ranks[number % len(ranks)]
                by_rank[source] += _cut(source, spec, box)
        return [message for message in chain.from_iterable(zip_longest(*by_rank)) if message is not None]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        tensors = tuple(TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in values["tensors"])
        return cls(tensors, values["data"], values["tensor"])

    def _box(self, spec: TensorSpec, rank: int) -> Region:
        box = whole_region(spec.shape)
        if spec.tensor_dim is not None:
            box = _chunk(box, spec.tensor_dim, self.tensor, rank % self.tensor)
        # A tensor without dimensions is whole on every rank.
        return _chunk(box, 0, self.data, rank // self.tensor) if box else box


def volume(region: Region) -> int:
    """Number of elements; 1 for ()."""
    return math.prod(end - begin for begin, end in region)


def _cut(source: int, spec: TensorSpec, box: Region) -> Iterator[Message]:
    most = MESSAGE_BYTES // spec.itemsize
    for begin in range(0, volume(box), most):
        yield Message(source, spec, box, begin, min(begin + most, volume(box)))


def _chunk(region: Region, dim: int, parts: int, index: int) -> Region:
    """Part `index` of a box that `torch.chunk` divides into `parts` along a dimension; it may be empty."""
    begin, end = region[dim]
    length = -(-(end - begin) // parts)
    part = (min(begin + index * length, end), min(begin + (index + 1) * length, end))
    return (*region[:dim], part, *region[dim + 1 :])
