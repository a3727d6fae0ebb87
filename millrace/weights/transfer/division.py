"""Who sends which part of a tensor to whom, for all tensors that are divided alike at once.

    trainer's boxes   ├── ranks 0, 1 ──┼── ranks 2, 3 ──┤       ranks of the same box are its holders
    worker's box           ├──────────────────┤
    overlaps               ├───────────┼──────┤                 each divided among the holders of its box

An overlap that is large is cut along its rows, one part per holder; a small one goes to a single holder. Which holder
comes first moves on with the tensor, the chain, the box and the worker (the overlap's turn), so that over many tensors
all holders send the same.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from millrace.weights.transfer.layout import Division, Region, TensorSpec, volume

Ints = npt.NDArray[np.int64]
Part = tuple[Region, int]
"""A region of a tensor, and its bytes."""


class TensorDivision:
    """How tensors of one shape, dtype and division over trainer ranks (S) and workers (W) travel.

    Raises ValueError if two ranks hold different boxes that overlap, or if nobody holds an element that a worker needs;
    the message lacks the tensor's name.
    """

    def __init__(self, spec: TensorSpec, source: Division, target: Division, part_bytes: int) -> None:
        self._ndim = len(spec.shape)
        self._itemsize = spec.itemsize
        holders: dict[Region, list[int]] = {}
        for rank, box in enumerate(source):
            if box is not None:
                holders.setdefault(box, []).append(rank)
        self._holders = list(holders.values())
        self._box_of = {rank: index for index, ranks in enumerate(self._holders) for rank in ranks}
        self._place_of = {rank: place for ranks in self._holders for place, rank in enumerate(ranks)}
        boxes = _bounds(list(holders), self._ndim)
        _refuse_overlaps(boxes, self._holders)
        self._needs = np.array([box is not None for box in target], dtype=bool)
        needed = _bounds([box or ((0, 0),) * self._ndim for box in target], self._ndim)
        # [boxes, W, dims]: where they overlap.
        self._begin = np.maximum(boxes[:, None, :, 0], needed[None, :, :, 0])
        self._end = np.minimum(boxes[:, None, :, 1], needed[None, :, :, 1])
        extents = np.maximum(self._end - self._begin, 0)
        self._volume = extents.prod(axis=-1) * self._needs
        self.received: Ints = self._volume.sum(axis=0) * self._itemsize
        """[W] bytes that each worker needs of one tensor."""
        if (self._volume.sum(axis=0) < (needed[:, :, 1] - needed[:, :, 0]).prod(axis=-1) * self._needs).any():
            raise ValueError("is not held whole by the trainer's ranks")
        self.period = math.lcm(*(len(ranks) for ranks in self._holders))
        """After so many turns everything repeats."""
        self._rows = extents[:, :, 0] if self._ndim else np.ones_like(self._volume)
        sizes = np.array([len(ranks) for ranks in self._holders], dtype=np.int64)[:, None]
        wanted = np.maximum(self._volume * self._itemsize // part_bytes, 1)
        self._parts = np.minimum(np.minimum(sizes, wanted), np.maximum(self._rows, 1))
        self.num_regions: Ints = (self._parts * (self._volume > 0)).sum(axis=0)
        """[W] into how many regions one tensor comes to each worker."""

    def parts(self, source: int, worker: int) -> tuple[Part | None, ...]:
        """What a trainer rank sends to a worker of the tensor with turn 0, 1, … up to where that repeats.

        None where it sends nothing; empty if it never does.
        """
        box = self._box_of.get(source)
        if box is None or not self._volume[box, worker]:
            return ()
        bounds = zip(self._begin[box, worker].tolist(), self._end[box, worker].tolist(), strict=True)
        region: Region = tuple(bounds)
        count, size = int(self._parts[box, worker]), len(self._holders[box])
        # Overlap (box, worker) of turn t begins with holder (box + worker + t).
        first = self._place_of[source] - box - worker
        return tuple(self._part(region, (first - turn) % size, count) for turn in range(size))

    def _part(self, region: Region, part: int, count: int) -> Part | None:
        """Part number `part` of so many of a region, cut along its rows; None if there is no such part."""
        if part >= count:
            return None
        if count > 1:
            (begin, end), *others = region
            rows = end - begin
            region = ((begin + rows * part // count, begin + rows * (part + 1) // count), *others)
        return region, volume(region) * self._itemsize

    def add_sent(self, sent: Ints, turns: Ints) -> None:
        """Adds to `sent` [S, W] the bytes that each rank sends to each worker for tensors of these turns."""
        for size in {len(ranks) for ranks in self._holders}:
            boxes = np.array([index for index, ranks in enumerate(self._holders) if len(ranks) == size])
            holders = np.array([self._holders[index] for index in boxes])
            counts = np.bincount(turns % size, minlength=size)
            for parts in np.unique(self._parts[boxes]):
                box, worker = np.nonzero((self._parts[boxes] == parts) & (self._volume[boxes] > 0))
                rows = self._rows[boxes[box], worker][:, None]
                steps = np.arange(parts + 1)
                # [overlaps, parts] bytes, of which part p with turn t goes to place p + t + first.
                nbytes = np.diff(rows * steps // parts, axis=1)
                nbytes = nbytes * (self._volume[boxes[box], worker][:, None] // rows) * self._itemsize
                places = counts[(np.arange(size)[None, :] - np.arange(parts)[:, None]) % size]
                shares = nbytes @ places
                first = (boxes[box] + worker)[:, None]
                ranks = holders[box[:, None], (np.arange(size)[None, :] + first) % size]
                # A rank has one place among the holders of its only box, so that no pair is there twice.
                sent[ranks, worker[:, None]] += shares


def _bounds(boxes: Sequence[Region], ndim: int) -> Ints:
    """[boxes, dims, 2]."""
    return np.array(boxes, dtype=np.int64).reshape(len(boxes), ndim, 2)


def _refuse_overlaps(boxes: Ints, holders: Sequence[Sequence[int]]) -> None:
    """Raises ValueError if two of these different boxes share an element."""
    for index in range(len(boxes) - 1):
        begin = np.maximum(boxes[index, :, 0], boxes[index + 1 :, :, 0])
        end = np.minimum(boxes[index, :, 1], boxes[index + 1 :, :, 1])
        if (shared := np.flatnonzero((begin < end).all(axis=-1))).size:
            one, other = holders[index][0], holders[index + 1 + shared[0]][0]
            raise ValueError(f"is held by ranks {one} and {other} in boxes that overlap only partly")
