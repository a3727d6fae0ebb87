"""Messages between ranks: commands of rank 0, samples as Arrow, text for all. Nothing is ever unpickled.

    rank 0 ──sizes, then JSON and payload──► all others     send ─► receive: the others wait here, for hours if need be
    all    ──text──► all                                    exchange

Everything goes through the CPU's memory over gloo, whatever device the ranks compute on.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from millrace.training.batch import Sample


def send(command: str, payload: bytes = b"", **arguments: Any) -> None:
    """Sends a command of rank 0 with its arguments, plain JSON, to all other ranks.

    Raises RuntimeError if one of them is gone.
    """
    text = json.dumps([command, arguments]).encode()
    dist.broadcast(torch.tensor([len(text), len(payload)]), 0)
    # A copy: torch makes no tensors from read-only memory.
    dist.broadcast(torch.frombuffer(bytearray(text + payload), dtype=torch.uint8), 0)


def receive() -> tuple[str, dict[str, Any], bytes]:
    """Waits for rank 0's next command, its arguments and its payload. Raises RuntimeError if rank 0 dies."""
    sizes = torch.empty(2, dtype=torch.int64)
    dist.broadcast(sizes, 0)
    message = torch.empty(int(sizes.sum()), dtype=torch.uint8)
    dist.broadcast(message, 0)
    content = message.numpy().tobytes()
    command, arguments = json.loads(content[: int(sizes[0])])
    return command, arguments, content[int(sizes[0]) :]


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
