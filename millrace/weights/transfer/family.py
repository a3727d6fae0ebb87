"""Generators of the same layout: they need the same bytes, so that one can hand on what it got to the next."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from millrace.errors import WeightsMismatch
from millrace.weights.transfer.chains import chains_of, num_chains
from millrace.weights.transfer.division import Ints, TensorDivision
from millrace.weights.transfer.layout import Division, Layout, Region, TensorSpec

_PARTS_PER_BUCKET = 1024
"""A region is divided among its holders in parts of at least this fraction of a bucket."""


@dataclass(frozen=True)
class _Way:
    """How one generator gets everything from the trainer."""

    tensors: tuple[tuple[TensorSpec, int, int], ...]
    """In the trainer's order, each with the index of its division in `counts` and its number among those divided alike.
    """
    counts: tuple[tuple[TensorDivision, int], ...]
    """How many tensors are divided alike."""
    received: Ints
    """[workers] bytes."""


@dataclass(frozen=True)
class Family:
    """All generators of one layout, and the chains that they form."""

    layout: Layout
    chains: tuple[tuple[int, ...], ...]
    """Generators, in the order in which they hand on."""
    num_trainers: int
    way: _Way

    @property
    def received(self) -> Ints:
        """[workers] bytes that each worker of a generator gets."""
        return self.way.received

    @property
    def num_regions(self) -> Ints:
        """[workers] regions of tensors that a worker gets, before messages cut any."""
        return sum(
            (division.num_regions * count for division, count in self.way.counts), np.zeros(self.layout.size, int)
        )

    def chain_of(self, generator: int) -> int | None:
        """The number of a generator's chain; None if it is of another family."""
        return next((number for number, chain in enumerate(self.chains) if generator in chain), None)

    def regions(self, source: int, chain: int, worker: int) -> Iterator[tuple[TensorSpec, Region, int]]:
        """What a trainer rank sends to a worker of this chain's first generator, in the trainer's order of tensors.

        The last number is the region's bytes.
        """
        # A large model has a thousand tensors and ten divisions.
        parts = [division.parts(source, worker) for division, _ in self.way.counts]
        for tensor, index, number in self.way.tensors:
            turns = parts[index]
            if turns and (part := turns[(number + chain) % len(turns)]) is not None:
                yield tensor, *part

    @cached_property
    def sent(self) -> Ints:
        """[trainer ranks, chains · workers] bytes that each sends to the workers of each chain's first generator."""
        sent = np.zeros((self.num_trainers, len(self.chains), self.layout.size), dtype=np.int64)
        for division, count in self.way.counts:
            for chain in range(min(division.period, len(self.chains))):
                one = np.zeros((self.num_trainers, self.layout.size), dtype=np.int64)
                division.add_sent(one, np.arange(count) + chain)
                sent[:, chain :: division.period] += one[:, None]
        return sent.reshape(self.num_trainers, -1)


def families_of(source: Layout, generators: Sequence[Layout], *, bucket_bytes: int) -> tuple[Family, ...]:
    """The generators by layout, in the order of their first members.

    Raises WeightsMismatch, naming the generator and a tensor, if the trainer does not have what a generator needs.
    """
    members: dict[int, list[int]] = {}
    layouts: dict[int, Layout] = {}
    for index, layout in enumerate(generators):
        # Equal layouts are often one object, and comparing them takes time.
        key = (
            id(layout)
            if id(layout) in members
            else next((k for k, other in layouts.items() if other == layout), id(layout))
        )
        layouts.setdefault(key, layout)
        members.setdefault(key, []).append(index)
    ways = {key: _way(source, layout, members[key][0], bucket_bytes) for key, layout in layouts.items()}
    needed = {key: int(way.received.sum()) for key, way in ways.items()}
    families = []
    for key, way in ways.items():
        num = num_chains(
            generators=len(members[key]),
            trainers=source.size,
            needed=needed[key],
            most_received=int(way.received.max()),
            others=(sum(needed.values()) - needed[key]) / source.size,
            bucket_bytes=bucket_bytes,
        )
        families.append(Family(layouts[key], chains_of(members[key], num), source.size, way))
    return tuple(families)


def _way(source: Layout, target: Layout, generator: int, bucket_bytes: int) -> _Way:
    _check_tensors(source, target, generator)
    targets = dict(zip((tensor.name for tensor in target.tensors), target.divisions, strict=True))
    alike: dict[tuple[str, tuple[int, ...], int, int], int] = {}
    divisions: list[TensorDivision] = []
    counts: list[int] = []
    tensors = []
    for tensor, division in zip(source.tensors, source.divisions, strict=True):
        needed = targets[tensor.name]
        key = (tensor.dtype, tensor.shape, id(division), id(needed))
        if key not in alike:
            alike[key] = len(divisions)
            divisions.append(_divided(tensor, division, needed, generator, bucket_bytes))
            counts.append(0)
        index = alike[key]
        tensors.append((tensor, index, counts[index]))
        counts[index] += 1
    received = np.zeros(target.size, dtype=np.int64)
    for one, count in zip(divisions, counts, strict=True):
        received += one.received * count
    return _Way(tuple(tensors), tuple(zip(divisions, counts, strict=True)), received)


def _divided(
    tensor: TensorSpec, source: Division, target: Division, generator: int, bucket_bytes: int
) -> TensorDivision:
    try:
        return TensorDivision(tensor, source, target, max(bucket_bytes // _PARTS_PER_BUCKET, 1))
    except ValueError as error:
        raise WeightsMismatch(f"generator {generator} can't be served: {tensor.name} {error}") from None


def _check_tensors(source: Layout, target: Layout, generator: int) -> None:
    held, needed = ({tensor.name: tensor for tensor in layout.tensors} for layout in (source, target))
    for name in sorted(held.keys() ^ needed.keys()):
        who, other = (
            ("the trainer", f"generator {generator}") if name in held else (f"generator {generator}", "the trainer")
        )
        raise WeightsMismatch(f"{who} has {name} and {other} has not")
    for name, tensor in held.items():
        if tensor != needed[name]:
            raise WeightsMismatch(
                f"generator {generator} has {name} as {needed[name].dtype} {list(needed[name].shape)}; "
                f"expected {tensor.dtype} {list(tensor.shape)}"
            )
