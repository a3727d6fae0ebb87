"""Ranks that do the hops of a transfer plan over arrays, as processes whose sends and receives block would."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from millrace.weights.transfer.layout import Region, TensorSpec
from millrace.weights.transfer.messages import Hop
from millrace.weights.transfer.plan import TransferPlan

_DTYPES = {"float32": np.int32, "bfloat16": np.int16, "int8": np.int8}
"""Integers of the same size: numpy knows no bfloat16."""
Array = npt.NDArray[np.int_]


class Ranks:
    """All ranks of a push. `versions` are the whole tensors, of which trainer ranks get what the layout says."""

    def __init__(self, plan: TransferPlan, versions: Mapping[str, Array]) -> None:
        self._plan = plan
        self._specs = {tensor.name: tensor for tensor in plan.source.tensors}
        held = [plan.source.held(rank) for rank in range(plan.source.size)]
        self._held = [{name: (box, versions[name][_index(box)].copy()) for name, box in line.items()} for line in held]
        needed = [layout.held(worker) for layout in plan.generators for worker in range(layout.size)]
        self.staged = [
            {name: np.zeros(_shape(box), _dtype(self._specs[name])) for name, box in line.items()} for line in needed
        ]
        self.writes = [{name: np.zeros(_shape(box), int) for name, box in line.items()} for line in needed]
        self._needed = needed
        self._waiting = {rank: plan.hops(rank)[::-1] for rank in range(plan.size)}
        self._buckets: dict[int, dict[int, bytes]] = {rank: {} for rank in range(plan.size)}
        self.most_buckets = Counter[int]()
        self.sent, self.received = Counter[int](), Counter[int]()
        self.wire = Counter[int]()

    def run(self) -> None:
        """Until all hops are done. Raises AssertionError if no rank can go on."""
        while any(self._waiting.values()):
            ready = [
                hops[-1]
                for rank, hops in self._waiting.items()
                if hops and hops[-1].source == rank and self._waiting[hops[-1].target][-1:] == hops[-1:]
            ]
            assert ready, "every rank waits for another"
            for hop in ready:
                self._do(hop)

    def _do(self, hop: Hop) -> None:
        self._waiting[hop.source].pop()
        self._waiting[hop.target].pop()
        if hop.source < self._plan.source.size:
            self._buckets[hop.source][hop.message.number] = self._packed(hop)
        bucket = self._buckets[hop.source][hop.message.number]
        assert len(bucket) == hop.message.nbytes <= self._plan.bucket_bytes
        self._unpack(hop, bucket)
        self._buckets[hop.target][hop.message.number] = bucket
        for rank in (hop.source, hop.target):
            self.most_buckets[rank] = max(self.most_buckets[rank], len(self._buckets[rank]))
            if not any(
                later.source == rank and later.message is not None and later.message.number == hop.message.number
                for later in self._waiting[rank]
            ):
                del self._buckets[rank][hop.message.number]
        self.wire[hop.source] += hop.message.nbytes

    def _packed(self, hop: Hop) -> bytes:
        buffer = np.zeros(hop.message.nbytes, np.uint8)
        used = 0
        for one in hop.message.slices:
            box, values = self._held[hop.source][one.tensor]
            assert one.offset % 16 == 0 and one.offset >= used, "slices overlap"
            values = values[_index(_inside(one.region, box))]
            used = one.offset + values.nbytes
            buffer[one.offset : used] = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
            self.sent[hop.source] += values.nbytes
        assert used == hop.message.nbytes
        return buffer.tobytes()

    def _unpack(self, hop: Hop, bucket: bytes) -> None:
        worker = hop.target - self._plan.source.size
        for one in hop.message.slices:
            inside = _index(_inside(one.region, self._needed[worker][one.tensor]))
            staged = self.staged[worker][one.tensor]
            shape = _shape(one.region)
            values = np.frombuffer(bucket, staged.dtype, int(np.prod(shape)), one.offset).reshape(shape)
            staged[inside] = values
            self.writes[worker][one.tensor][inside] += 1
            self.received[hop.target] += values.nbytes
            if hop.source >= self._plan.source.size:
                self.sent[hop.source] += values.nbytes


def versions_of(tensors: tuple[TensorSpec, ...]) -> dict[str, Array]:
    """Different numbers in all elements, as far as the dtype has so many."""
    return {
        tensor.name: (np.arange(int(np.prod(tensor.shape))) + index).astype(_dtype(tensor)).reshape(tensor.shape)
        for index, tensor in enumerate(tensors)
    }


def _dtype(spec: TensorSpec) -> type:
    return _DTYPES[spec.dtype]


def _shape(region: Region) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in region)


def _index(region: Region) -> tuple[slice, ...]:
    return tuple(slice(begin, end) for begin, end in region)


def _inside(region: Region, box: Region) -> Region:
    """A region counted from the box's first element."""
    for (begin, end), (first, last) in zip(region, box, strict=True):
        assert first <= begin <= end <= last, "outside of the box"
    return tuple((begin - first, end - first) for (begin, end), (first, _) in zip(region, box, strict=True))
