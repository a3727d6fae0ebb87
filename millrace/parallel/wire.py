"""What rank 0 says to the other ranks, and how samples travel: as Arrow, so that nothing is ever unpickled.

    rank 0 ──[word, bytes] int64──► all others     tell ─► hear: they wait here, for hours if need be
           ──payload uint8────────►
    all    ──text──► all                           exchange

All in the CPU's memory over gloo, whatever the ranks compute on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from millrace.batch import Sample


class Word(IntEnum):
    """What the others are to do."""

    END = 0
    """Rank 0 has done its work or failed at something of its own: end, as if all were well."""
    STEP = 1
    """Payload: samples."""
    WEIGHTS = 2
    NEXT_LOGPROBS = 3
    """Payload: after which tokens, and of how many."""
    CHECKPOINT = 4
    """Payload: of which policy version, in decimal."""
    RESTORE = 5
    """Payload: which checkpoint of which run."""
    SLEEP = 6
    WAKE = 7


@dataclass(frozen=True, kw_only=True)
class Order:
    """One thing that was said."""

    word: Word
    payload: bytes = b""


def tell(order: Order) -> None:
    """Says it to all others; for rank 0. Raises RuntimeError where one of them is gone."""
    dist.broadcast(torch.tensor([order.word, len(order.payload)], dtype=torch.int64), 0)
    if order.payload:
        # A copy, for a tensor may not be made of memory that can't be written.
        dist.broadcast(torch.frombuffer(bytearray(order.payload), dtype=torch.uint8), 0)


def hear() -> Order:
    """Waits for what rank 0 says next; for the others. Raises RuntimeError where it is gone."""
    heading = torch.empty(2, dtype=torch.int64)
    dist.broadcast(heading, 0)
    word, nbytes = heading.tolist()
    payload = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes:
        dist.broadcast(payload, 0)
    return Order(word=Word(word), payload=payload.numpy().tobytes())


def exchange(text: str, size: int, group: dist.ProcessGroup | None = None) -> list[str]:
    """[size] what each of so many ranks says here, by rank; every one has to come. One that is alone hears itself.

    They meet in `group`, None for the one of all: each thread that exchanges needs a group of its own.
    """
    if size == 1:
        return [text]
    own = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text.encode())]), group=group)
    room = torch.zeros(max(1, *(int(length) for length in lengths)), dtype=torch.uint8)
    room[: own.numel()] = own
    said = [torch.empty_like(room) for _ in lengths]
    dist.all_gather(said, room, group=group)
    return [bytes(one[: int(length)].numpy()).decode() for one, length in zip(said, lengths, strict=True)]


def pack(samples: Sequence[Sample]) -> bytes:
    """`samples`, at least one, as one Arrow IPC stream: a column a field, bit for bit; `unpack` is the inverse."""
    columns = {field.name: _column([getattr(sample, field.name) for sample in samples]) for field in fields(Sample)}
    batch = pa.RecordBatch.from_pydict(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def unpack(payload: bytes) -> list[Sample]:
    """The samples, in their order."""
    with pa.ipc.open_stream(payload) as reader:
        (batch,) = reader
    columns = [_values(column) for column in batch.columns]
    return [Sample(**dict(zip(batch.schema.names, row, strict=True))) for row in zip(*columns, strict=True)]


def _column(values: list[Any]) -> pa.Array:
    """[samples] numbers, or lists where each value is a vector."""
    if not isinstance(values[0], np.ndarray):
        return pa.array(values)
    ends = np.cumsum([0, *(len(value) for value in values)])
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), pa.array(np.concatenate(values)))


def _values(column: pa.Array) -> list[Any]:
    if not pa.types.is_large_list(column.type):
        return list(column.to_pylist())
    # Of its own memory: torch warns of what can't be written.
    flat = column.values.to_numpy().copy()
    return np.split(flat, column.offsets.to_numpy()[1:-1])
