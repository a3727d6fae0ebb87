"""Messages between ranks: commands of rank 0, samples as Arrow, text for all. Nothing is ever unpickled.

    rank 0 ──[command, bytes] int64──► all others     send ─► receive: the others wait here, for hours if need be
           ──payload uint8───────────►
    all    ──text──► all                              exchange

Everything goes through the CPU's memory over gloo, whatever device the ranks compute on.
"""

from collections.abc import Sequence
from dataclasses import fields
from enum import IntEnum
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from millrace.training.batch import Sample


class Command(IntEnum):
    """Commands of rank 0 to the other ranks."""

    END = 0
    """Rank 0 has finished, or failed outside of a command: end normally."""
    STEP = 1
    """Payload: factor of the learning rate as float64, samples."""
    WEIGHTS = 2
    NEXT_LOGPROBS = 3
    """Payload: the tokens before, and the number of next tokens."""
    CHECKPOINT = 4
    """Payload: the policy version, in decimal."""
    RESTORE = 5
    """Payload: the checkpoint and its run."""
    SLEEP = 6
    WAKE = 7
    HAND_OVER = 8
    """Payload: the manifest of the version whose shards each rank hands over."""


def send(command: Command, payload: bytes = b"") -> None:
    """Called by rank 0: sends a command to all other ranks. Raises RuntimeError if one of them is gone."""
    dist.broadcast(torch.tensor([command, len(payload)], dtype=torch.int64), 0)
    if payload:
        # A copy: torch makes no tensors from read-only memory.
        dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0)


def receive() -> tuple[Command, bytes]:
    """Called by the other ranks: waits for the next command and its payload. Raises RuntimeError if rank 0 is gone."""
    heading = torch.empty(2, dtype=torch.int64)
    dist.broadcast(heading, 0)
    command, nbytes = heading.tolist()
    payload = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes:
        dist.broadcast(payload, 0)
    return Command(command), payload.numpy().tobytes()


def exchange(text: str, size: int, group: dist.ProcessGroup | None = None) -> list[str]:
    """[size] the texts of all ranks, by rank; every rank has to call this.

    `group` is the process group, None for the default one: each thread that exchanges needs its own group.
    """
    if size == 1:
        return [text]
    encoded = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text.encode())]), group=group)
    padded = torch.zeros(max(1, *(int(length) for length in lengths)), dtype=torch.uint8)
    padded[: encoded.numel()] = encoded
    texts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(texts, padded, group=group)
    return [bytes(row[: int(length)].numpy()).decode() for row, length in zip(texts, lengths, strict=True)]


def pack(samples: Sequence[Sample]) -> bytes:
    """`samples`, at least one, as one Arrow IPC stream, a column per field, bit for bit; `unpack` is the inverse."""
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
    """[samples] numbers, or lists if each value is a vector."""
    if not isinstance(values[0], np.ndarray):
        return pa.array(values)
    ends = np.cumsum([0, *(len(value) for value in values)])
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), pa.array(np.concatenate(values)))


def _values(column: pa.Array) -> list[Any]:
    if not pa.types.is_large_list(column.type):
        return list(column.to_pylist())
    # A copy: torch warns about read-only memory.
    flat = column.values.to_numpy().copy()
    return np.split(flat, column.offsets.to_numpy()[1:-1])
