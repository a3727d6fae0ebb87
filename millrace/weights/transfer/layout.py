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
    """What each of several ranks holds of the same tensors, or needs of them.

    Raises ValueError for two tensors of the same name, a dtype that torch doesn't have, and a box that is not inside
    its tensor.
    """

    tensors: tuple[TensorSpec, ...]
    divisions: tuple[Division, ...]
    """One per tensor; equal ones are one object."""
    size: int
    """Number of ranks."""

    def __post_init__(self) -> None:
        same: dict[Division, Division] = {}
        by_id: dict[int, Division] = {}
        checked: set[tuple[int, tuple[int, ...]]] = set()
        if len({tensor.name for tensor in self.tensors}) < len(self.tensors):
            raise ValueError("a layout has two tensors of the same name")
        for tensor, division in zip(self.tensors, self.divisions, strict=True):
            # Hashing and checking take time, and most tensors have the division of another.
            if id(division) not in by_id:
                by_id[id(division)] = same.setdefault(division, division)
            if (id(division), tensor.shape) not in checked:
                _check(tensor, division, self.size)
                checked.add((id(division), tensor.shape))
            if not isinstance(getattr(torch, tensor.dtype, None), torch.dtype):
                raise ValueError(f"{tensor.name} has the dtype {tensor.dtype}, which torch doesn't have")
        object.__setattr__(self, "divisions", tuple(by_id[id(division)] for division in self.divisions))

    @classmethod
    def of(cls, tensors: Iterable[TensorSpec], held: Sequence[Mapping[str, Region]]) -> Self:
        """From what each rank holds, by tensor; a name that is missing or a box without elements is nothing.

        Raises ValueError as the constructor, and for a name that is not among the tensors.
        """
        tensors = tuple(tensors)
        names = {tensor.name for tensor in tensors}
        for rank, line in enumerate(held):
            if unknown := sorted(line.keys() - names):
                raise ValueError(f"rank {rank} holds {unknown[0]}, which is not in the layout")
        divisions = (tuple(_filled(line.get(tensor.name)) for line in held) for tensor in tensors)
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

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, with each way of dividing once. Equal layouts have equal JSON."""
        numbers: dict[int, int] = {}
        tensors = [
            [tensor.name, tensor.dtype, list(tensor.shape), numbers.setdefault(id(division), len(numbers))]
            for tensor, division in zip(self.tensors, self.divisions, strict=True)
        ]
        return {
            "size": self.size,
            "tensors": tensors,
            "divisions": list({id(division): division for division in self.divisions}.values()),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`.

        Raises KeyError, IndexError, TypeError or ValueError if the values are not a layout's.
        """
        divisions = [
            tuple(None if box is None else tuple((begin, end) for begin, end in box) for box in division)
            for division in values["divisions"]
        ]
        tensors = tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape, _ in values["tensors"])
        return cls(tensors, tuple(divisions[number] for *_, number in values["tensors"]), values["size"])


def volume(region: Region) -> int:
    """Number of elements; 1 for ()."""
    return math.prod(end - begin for begin, end in region)


def _filled(region: Region | None) -> Region | None:
    return None if region is None or not volume(region) else region


def _check(tensor: TensorSpec, division: Division, size: int) -> None:
    if len(division) != size:
        raise ValueError(f"{tensor.name} has boxes of {len(division)} ranks; expected {size}")
    for region in division:
        if region is None:
            continue
        if len(region) != len(tensor.shape) or any(
            not 0 <= begin < end <= extent for (begin, end), extent in zip(region, tensor.shape, strict=True)
        ):
            raise ValueError(f"{list(region)} is not a box of {tensor.name} {list(tensor.shape)}")
