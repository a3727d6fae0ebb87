"""Blocks, the rectangular parts of tensors that a rank holds, and safetensors files of them in main memory.

    tensor [6, 4] over 2 ranks     rank 0: block [3, 4] at (0, 0)  ─► model-0-of-2.safetensors
    (DTensor, Shard(0))            rank 1: block [3, 4] at (3, 0)  ─► model-1-of-2.safetensors
    one rank                       the tensor itself               ─► model.safetensors

The files of several ranks have the format of torch.distributed.checkpoint's HuggingFaceStorageWriter: the header holds
the offsets of the blocks, so torch's own reader reads them too, from a folder.

    header: names, dtypes, shapes, offsets ┃ values ┃ values ┃ …      the file's bytes, laid out once
                                               ▲        ▲
    blocks, where the trainer computes ──copied┴────────┘             at every checkpoint

So a checkpoint stops training for one copy, and takes no more memory than its files. Nothing has to be serialized
afterwards: that would hold Python's lock, and stop training too.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor

from millrace.training.checkpoints.names import MODEL, file_name
from millrace.training.parallel.ranks import local

_OFFSETS, _VERSION = "DCP_SHARDING_INFO", {"DCP_VERSION": "1.0"}
"""Header keys, as torch writes them: JSON {name: {"saved_offsets": [int]}}, and its version."""
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
"""By safetensors' name, in its order: values of the last dtype come first in a file."""
MOST_BYTES = 4 << 30
"""Limit for the tensors of one file: object stores accept 5 GB per request."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a tensor, with its values."""

    values: torch.Tensor
    offsets: tuple[int, ...]
    """Index of its first element in the whole tensor, per dimension."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of a tensor, as a file's header describes it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    """Byte range of its values in the file, counted from the header's end."""
    end: int
    file: str
    """Name of the file."""


def blocks_to_write(tensors: Mapping[str, torch.Tensor], rank: int) -> Iterator[tuple[str, Block]]:
    """The blocks of `tensors` that this rank writes, by name, as views; over all ranks each element occurs once.

    Of a DTensor each rank writes its part. Any other tensor is the same on all ranks, and rank 0 writes it.
    """
    for item in create_default_local_save_plan(dict(tensors), rank == 0).items:
        tensor = tensors[item.index.fqn]
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        # A rank may hold no part of a small tensor.
        if _is_ours(tensor, rank) and not (isinstance(tensor, DTensor) and chunk.sizes.numel() == 0):
            yield item.index.fqn, Block(local(tensor.detach()), tuple(chunk.offsets))


def _is_ours(tensor: torch.Tensor, rank: int) -> bool:
    """Whether this rank is the first of those that hold the same block: that one writes it."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    # A tensor that only the data ranks divide is on one mesh per tensor rank, all with the same values.
    if coordinate is None or 0 not in mesh.mesh:
        return False
    return all(at == 0 for at, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())


def file_header(kind: str, blocks: Mapping[str, Block], size: int) -> bytes:
    """The header of the safetensors file of one of `size` ranks, byte for byte as the library writes it, which makes a
    header only together with copies of all values. Format: https://github.com/huggingface/safetensors#format."""
    ranks = {name: rank for rank, name in enumerate(_DTYPES)}
    names = {dtype: name for name, dtype in _DTYPES.items()}
    described: dict[str, Any] = {}
    if size > 1:
        offsets = {name: {"saved_offsets": block.offsets} for name, block in blocks.items()}
        described["__metadata__"] = {"format": "pt", _OFFSETS: json.dumps(offsets), **_VERSION}
    elif kind == MODEL:
        described["__metadata__"] = {"format": "pt"}
    end = 0
    for name in sorted(blocks, key=lambda name: (-ranks[names[blocks[name].values.dtype]], name)):
        values = blocks[name].values
        start, end = end, end + values.nbytes
        described[name] = {
            "dtype": names[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    # Aligns the values of every dtype.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_length(start: bytes) -> int:
    """Length of a safetensors file's header, bytes, including the 8 at its start that hold it."""
    return 8 + int.from_bytes(start[:8], "little")


def extents(header: bytes, file: str) -> dict[str, Extent]:
    """The blocks of the safetensors file `file` by name.

    Raises ValueError, KeyError, TypeError or AttributeError for damage.
    """
    described = json.loads(header[8:])
    offsets = json.loads(described.pop("__metadata__", {}).get(_OFFSETS, "{}"))
    return {
        name: Extent(
            offsets=tuple(offsets[name]["saved_offsets"]) if offsets else (0,) * len(about["shape"]),
            shape=tuple(about["shape"]),
            dtype=_DTYPES[about["dtype"]],
            start=about["data_offsets"][0],
            end=about["data_offsets"][1],
            file=file,
        )
        for name, about in described.items()
    }


def read_part(
    extent: Extent, offsets: Sequence[int], lengths: Sequence[int], read_into: Callable[[int, memoryview], None]
) -> torch.Tensor:
    """The part of a block that starts at `offsets` within it, on the CPU; no other byte of the file is read.

    `read_into(start, buffer)` fills `buffer` with the file's bytes from `start` on, counted from the header's end.
    """
    strides = [math.prod(extent.shape[dim + 1 :]) for dim in range(len(extent.shape))]
    # From this dimension on, the part's values are consecutive in the file.
    whole = len(extent.shape)
    while whole and lengths[whole - 1] == extent.shape[whole - 1]:
        whole -= 1
    inner = max(whole - 1, 0)
    size = extent.dtype.itemsize
    run = math.prod(lengths[inner:]) * size
    buffer = bytearray(math.prod(lengths) * size)
    starts = [range(at, at + length) for at, length in zip(offsets[:inner], lengths[:inner], strict=True)]
    first = sum(at * stride for at, stride in zip(offsets[inner:], strides[inner:], strict=True))
    for number, index in enumerate(itertools.product(*starts)):
        start = first + sum(at * stride for at, stride in zip(index, strides[:inner], strict=True))
        read_into(extent.start + start * size, memoryview(buffer)[number * run : (number + 1) * run])
    return torch.frombuffer(buffer, dtype=extent.dtype).view(tuple(lengths))


class FileImage:
    """The file of `blocks`, of one of `size` ranks, without values before `take`; pinned if they are on a GPU."""

    def __init__(self, kind: str, blocks: Mapping[str, Block], size: int) -> None:
        header = file_header(kind, blocks, size)
        self._extents = extents(header, file_name(kind, 0, size))
        nbytes = max((extent.end for extent in self._extents.values()), default=0)
        pinned = any(block.values.is_cuda for block in blocks.values())
        self._bytes = torch.empty(len(header) + nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._bytes[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        values = self._bytes[len(header) :]
        self._values = {
            name: values[extent.start : extent.end].view(extent.dtype).view(extent.shape)
            for name, extent in self._extents.items()
        }

    def fits(self, blocks: Mapping[str, Block]) -> bool:
        """Whether `blocks` differ from this file's only in their values."""
        return self._extents.keys() == blocks.keys() and all(
            (extent.offsets, extent.shape, extent.dtype)
            == (blocks[name].offsets, tuple(blocks[name].values.shape), blocks[name].values.dtype)
            for name, extent in self._extents.items()
        )

    def take(self, blocks: Mapping[str, Block]) -> None:
        """Copies the values in. From a GPU the copy is asynchronous: synchronize before reading `data`."""
        for name, block in blocks.items():
            self._values[name].copy_(block.values, non_blocking=True)

    @property
    def data(self) -> memoryview:
        """The file's bytes; the next `take` changes them."""
        return self._bytes.numpy().data


def in_files(blocks: Mapping[str, Block], most_bytes: int) -> Iterator[dict[str, Block]]:
    """`blocks` in their order, file by file: at least one file, each of at most `most_bytes` or of a single tensor."""
    held: dict[str, Block] = {}
    nbytes = 0
    for name, block in blocks.items():
        if held and nbytes + block.values.nbytes > most_bytes:
            yield held
            held, nbytes = {}, 0
        held[name] = block
        nbytes += block.values.nbytes
    yield held


def lone_files(tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, bytes]:
    """The files by name of a checkpoint by a single rank; `tensors` are by kind and name."""
    files = {}
    for kind, named in tensors.items():
        blocks = {name: Block(block.values.cpu(), block.offsets) for name, block in blocks_to_write(named, 0)}
        image = FileImage(kind, blocks, 1)
        image.take(blocks)
        files[file_name(kind, 0, 1)] = bytes(image.data)
    return files
