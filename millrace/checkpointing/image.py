"""Safetensors files in the main memory into which one checkpoint after another is copied.

    header: names, dtypes, shapes, offsets ┃ values ┃ values ┃ …      the file's bytes, laid out once
                                               ▲        ▲
    blocks, where the trainer computes ──copied┴────────┘             at every checkpoint

So a checkpoint costs one copy while training stands still, and no memory but the files' own. Nothing is left to
serialize afterwards, which would hold Python's lock, and the training with it.
"""

from collections.abc import Iterator, Mapping

import torch

from millrace.checkpointing.blocks import Block, blocks_to_write, extents, file_header
from millrace.checkpointing.names import file_name

MOST_BYTES = 4 << 30
"""Of tensors in one file: object stores take 5 GB in one request."""


class FileImage:
    """The file of these blocks, of one of `size` ranks; where they are on a device, in memory that it copies into.

    Holds their names and shapes, and no values before `take`.
    """

    def __init__(self, kind: str, blocks: Mapping[str, Block], size: int) -> None:
        header = file_header(kind, blocks, size)
        self._extents = extents(header)
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
        """Whether `blocks` are others only by their values."""
        return self._extents.keys() == blocks.keys() and all(
            (extent.offsets, extent.shape, extent.dtype)
            == (blocks[name].offsets, tuple(blocks[name].values.shape), blocks[name].values.dtype)
            for name, extent in self._extents.items()
        )

    def take(self, blocks: Mapping[str, Block]) -> None:
        """Copies the values in; from a device it has only begun to, on return."""
        for name, block in blocks.items():
            self._values[name].copy_(block.values, non_blocking=True)

    @property
    def data(self) -> memoryview:
        """The file's bytes; they change when the next values are taken."""
        return self._bytes.numpy().data


def in_files(blocks: Mapping[str, Block], most_bytes: int) -> Iterator[dict[str, Block]]:
    """`blocks`, in their order, file by file: at least one, each of at most so many bytes or of a single tensor."""
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
    """The files, by name, of a checkpoint that one rank alone makes of `tensors`, which are by kind and name."""
    files = {}
    for kind, named in tensors.items():
        blocks = {name: Block(block.values.cpu(), block.offsets) for name, block in blocks_to_write(named, 0)}
        image = FileImage(kind, blocks, 1)
        image.take(blocks)
        files[file_name(kind, 0, 1)] = bytes(image.data)
    return files
