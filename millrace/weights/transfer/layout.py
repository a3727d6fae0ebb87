"""What each process holds of a model: a box of each tensor.

    model.layers.0.mlp.down_proj.weight [8, 6] ─► rank 0: ((0, 4), (0, 6)), rank 1: ((4, 8), (0, 6)), rank 2: nothing

In a large model most tensors are divided alike, so a layout keeps each way of dividing once, however many layers there
are.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

Region = tuple[tuple[int, int], ...]
"""A half-open range of indices per dimension of the whole tensor; () is all of a tensor without dimensions."""

Division = tuple[Region | None, ...]
"""The box of one tensor that each rank has; None if it has no element of it."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as the generators know it. Tied tensors have one name."""

    name: str
    dtype: str
    """`float32`, `bfloat16`, …"""
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        size: int = getattr(torch, self.dtype).itemsize
        return size

    @property
    def whole(self) -> Region:
        """All of it."""
        return tuple((0, extent) for extent in self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """What each of several ranks holds of the same tensors, or needs of them."""

    tensors: tuple[TensorSpec, ...]
    divisions: tuple[Division, ...]
    """One per tensor; tensors that are divided alike share the object."""
    size: int
    """Number of ranks."""

    def __post_init__(self) -> None:
        same: dict[Division, Division] = {}
        by_id: dict[int, Division] = {}
        for division in self.divisions:
            # Hashing a division takes time, and most tensors have the object of another.
            if id(division) not in by_id:
                by_id[id(division)] = same.setdefault(division, division)
        object.__setattr__(self, "divisions", tuple(by_id[id(division)] for division in self.divisions))

    @classmethod
    def of(cls, tensors: Iterable[TensorSpec], held: Sequence[Mapping[str, Region]]) -> Self:
        """From what each rank holds, by tensor; a name that is missing or a box without elements is nothing.

        Raises ValueError for a name that is not among the tensors, a name that is there twice, and for a box that is
        not inside its tensor.
        """
        tensors = tuple(tensors)
        names = {tensor.name for tensor in tensors}
        if len(names) < len(tensors):
            raise ValueError("a layout has two tensors of the same name")
        for rank, line in enumerate(held):
            if unknown := sorted(line.keys() - names):
                raise ValueError(f"rank {rank} holds {unknown[0]}, which is not in the layout")
        divisions = (tuple(_checked(tensor, line.get(tensor.name)) for line in held) for tensor in tensors)
        return cls(tensors, tuple(divisions), len(held))

    def held(self, rank: int) -> dict[str, Region]:
        """The boxes of one rank by tensor, without those it has nothing of."""
        return {
            tensor.name: box
            for tensor, division in zip(self.tensors, self.divisions, strict=True)
            if (box := division[rank]) is not None
        }

    def nbytes(self, rank: int) -> int:
        """Bytes of one rank's boxes."""
        return sum(
            volume(box) * tensor.itemsize
            for tensor, division in zip(self.tensors, self.divisions, strict=True)
            if (box := division[rank]) is not None
        )

    def described(self) -> tuple[Any, ...]:
        """All of it, each way of dividing once: equal layouts have equal descriptions."""
        numbers: dict[int, int] = {}
        for division in self.divisions:
            numbers.setdefault(id(division), len(numbers))
        tensors = [
            (tensor.name, tensor.dtype, tensor.shape, numbers[id(division)])
            for tensor, division in zip(self.tensors, self.divisions, strict=True)
        ]
        return tensors, list({id(division): division for division in self.divisions}.values())

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "tensors": [[tensor.name, tensor.dtype, list(tensor.shape)] for tensor in self.tensors],
            "held": [self.held(rank) for rank in range(self.size)],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`. Raises KeyError, TypeError or ValueError if the values are not a layout's."""
        tensors = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in values["tensors"]]
        lines = [
            {name: tuple((begin, end) for begin, end in box) for name, box in line.items()} for line in values["held"]
        ]
        return cls.of(tensors, lines)


def volume(region: Region) -> int:
    """Number of elements; 1 for ()."""
    return math.prod(end - begin for begin, end in region)


def _checked(tensor: TensorSpec, region: Region | None) -> Region | None:
    if region is None:
        return None
    if len(region) != len(tensor.shape) or any(
        not 0 <= begin <= end <= extent for (begin, end), extent in zip(region, tensor.shape, strict=True)
    ):
        raise ValueError(f"{list(region)} is not a box of {tensor.name} {list(tensor.shape)}")
    return region if volume(region) else None
