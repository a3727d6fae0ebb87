"""Regions of tensors, packed into messages of at most a bucket.

regions  ████████████ ███ ██ █████████
messages [███████████][█ ███ ██ ████][█████]      cut along rows; each slice begins at a multiple of 16 bytes

On request large regions have messages of their own, before all others. Their rows often lie in one piece at both ends,
and then are sent from there and received there, without a copy to a bucket and one out of it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from millrace.weights.transfer.layout import Region, TensorSpec, volume

ALIGN = 16
"""Bytes: a multiple of every dtype's own alignment, and what a vectorised copy wants."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a tensor in a message: its elements in row-major order, in the tensor's dtype."""

    tensor: str
    region: Region
    offset: int
    """Of its first byte from the message's; a multiple of 16."""


@dataclass(frozen=True, slots=True)
class Message:
    """What travels at once."""

    number: int
    """Differs from that of every other message of the push."""
    slices: tuple[Slice, ...]
    nbytes: int
    """From the first slice's first byte to the last one's last; between slices up to 15 are unused."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One message from one rank of the push to another."""

    source: int
    target: int
    message: Message
    round: int
    """In a round each rank sends at most one message and receives at most one. Numbers are skipped."""


def pack(
    regions: Iterable[tuple[TensorSpec, Region, int]], bucket_bytes: int, alone_bytes: int | None = None
) -> Iterator[tuple[tuple[Slice, ...], int, int]]:
    """(slices, bytes, bytes of the slices alone) of each message; together they are the regions, in their order.

    Each region comes with its bytes. Those of at least `alone_bytes` come first and share no message; None: all share.
    """
    together = []
    for one in regions:
        if alone_bytes is not None and one[2] >= alone_bytes:
            yield from _filled([one], bucket_bytes)
        else:
            together.append(one)
    yield from _filled(together, bucket_bytes)


def _filled(
    regions: Iterable[tuple[TensorSpec, Region, int]], bucket_bytes: int
) -> Iterator[tuple[tuple[Slice, ...], int, int]]:
    """Messages that are as full as they can be, of these regions in their order."""
    slices: list[Slice] = []
    used = payload = 0
    for tensor, region, nbytes in regions:
        offset = -(-used // ALIGN) * ALIGN
        if nbytes <= bucket_bytes - offset:
            slices.append(Slice(tensor.name, region, offset))
            used = offset + nbytes
            payload += nbytes
            continue
        rest = [region]
        while rest:
            offset = -(-used // ALIGN) * ALIGN
            piece, left = _cut(rest[0], bucket_bytes - offset, tensor.itemsize, deep=not slices)
            if piece is None:
                yield tuple(slices), used, payload
                slices, used, payload = [], 0, 0
                continue
            slices.append(Slice(tensor.name, piece, offset))
            used = offset + volume(piece) * tensor.itemsize
            payload += volume(piece) * tensor.itemsize
            rest = left + rest[1:]
    if slices:
        yield tuple(slices), used, payload


def _cut(region: Region, room: int, itemsize: int, *, deep: bool) -> tuple[Region | None, list[Region]]:
    """The first part of a box that fits into `room` bytes, and the rest as boxes; a row is divided only if `deep`."""
    for dim, (begin, end) in enumerate(region):
        row = itemsize * math.prod(stop - start for start, stop in region[dim + 1 :])
        if row <= room:
            cut = min(begin + room // row, end)
            break
        if not deep:
            return None, [region]
        if end - begin > 1:
            first = (*region[:dim], (begin, begin + 1), *region[dim + 1 :])
            piece, left = _cut(first, room, itemsize, deep=True)
            return piece, [*left, (*region[:dim], (begin + 1, end), *region[dim + 1 :])]
    else:
        return (region, []) if itemsize <= room else (None, [region])
    piece = (*region[:dim], (begin, cut), *region[dim + 1 :])
    return piece, [(*region[:dim], (cut, end), *region[dim + 1 :])] if cut < end else []
