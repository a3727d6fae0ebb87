"""Safetensors files in main memory, which each checkpoint overwrites.

    header: names, dtypes, shapes, offsets ┃ values ┃ values ┃ …      the file's bytes, laid out once
                                               ▲        ▲
    blocks, where the trainer computes ──copied┴────────┘             at every checkpoint

So a checkpoint stops training for one copy, and takes no more memory than its files, or than one of them where a large
policy on a CPU is copied file by file (`saving.py`). Nothing has to be serialized
afterwards: that would hold Python's lock, and stop training too.
"""

from collections.abc import Iterator, Mapping

import torch

from millrace.training.checkpoints.blocks import Block, blocks_to_write, extents, file_header
from millrace.training.checkpoints.names import file_name

MOST_BYTES = 4 << 30
"""Limit for the tensors of one file: object stores accept 5 GB per request."""


class FileImage:
    """The file of `blocks`, of one of `size` ranks; in pinned memory if they are on a GPU.

    It holds their names and shapes, and no values before `take`.
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
