"""Tensors out of a checkpoint written by any number of ranks: whole, or the blocks of the reader's own layout.

    headers of a kind's files ─► blocks in the store ─┐
    the reader's tensors ─────────────────────────────┴─► plan: which part of which block goes where
    each file in the plan, verified whole ─► its parts ─► copies on the CPU ─► into the reader's tensors

torch.distributed.checkpoint makes the plan. The reader's tensors change only after everything was read. One file is
open at a time: mapped if the store is a folder, in memory if not.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from millrace.errors import WeightsMismatch
from millrace.training.checkpoints.files import Extent, extents, header_length, read_part
from millrace.training.checkpoints.names import kind_of
from millrace.training.parallel.ranks import local
from storage.checkpoints import Checkpoint
from storage.errors import NotInStore, StreamCorrupt
from storage.stores.base import BytesLike, Store
from storage.streams.files import get_file

_HEADER_READS = 5


class StoredFiles(Mapping[str, BytesLike]):
    """The files of a checkpoint by name, each loaded from the store on access, and verified.

    Access raises StreamCorrupt if the file is damaged or missing.
    """

    def __init__(self, store: Store, checkpoint: Checkpoint) -> None:
        self._store = store
        self._refs = checkpoint.files

    def __getitem__(self, name: str) -> memoryview:
        return get_file(self._store, self._refs[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._refs)

    def __len__(self) -> int:
        return len(self._refs)

    def path(self, name: str) -> str:
        """The file's path in the store."""
        return self._refs[name].path

    def header(self, name: str) -> bytes:
        """The header of a safetensors file: enough to know whether the file is needed.

        The checksum covers the whole file, so it can't verify the header. The header is read until two reads agree, in
        case it is damaged in transit.
        """
        path = self.path(name)
        last = None
        try:
            for _ in range(_HEADER_READS):
                length = header_length(bytes(self._store.get(path, 0, 8)))
                header = bytes(self._store.get(path, 0, min(length, self._refs[name].bytes)))
                if header == last:
                    return header
                last = header
        except NotInStore as error:
            raise StreamCorrupt(path, "the file is missing") from error
        raise StreamCorrupt(path, f"its header was different each time it was read, {_HEADER_READS} times in a row")


class StoredTensors:
    """The tensors of one kind in a checkpoint, in any number of files.

    `files` are the checkpoint's, by name; `StoredFiles` loads only those that are needed. Raises StreamCorrupt if a
    header can't be read.
    """

    def __init__(self, files: Mapping[str, BytesLike], kind: str) -> None:
        self._files = files
        self._kind = kind
        self._stored: dict[str, list[Extent]] = defaultdict(list)
        for name in sorted(files):
            if kind_of(name) == kind:
                for tensor, extent in self._extents(name).items():
                    self._stored[tensor].append(extent)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of each whole tensor, by name."""
        return {name: _size(extents) for name, extents in self._stored.items()}

    def read(
        self, like: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor] | None = None
    ) -> Mapping[str, torch.Tensor]:
        """Copies on the CPU, by name, of this rank's parts of `like`: blocks of DTensors, whole tensors otherwise.

        They have the stored dtypes; or they are the tensors of `into`, of these shapes, which an error leaves partly
        changed. Raises WeightsMismatch if a tensor of `like` is missing in the checkpoint or has another shape there,
        and StreamCorrupt.
        """
        for name, tensor in like.items():
            if (shape := self.shapes.get(name)) != tensor.shape:
                self._verify()
                stored_shape = "no such tensor" if shape is None else f"one of {list(shape)}"
                raise WeightsMismatch(
                    f"the model has {name} of {list(tensor.shape)} and the checkpoint {stored_shape}; "
                    "expected a checkpoint of the same model"
                )
        made = into or {
            name: torch.empty(local(tensor).shape, dtype=self._stored[name][0].dtype) for name, tensor in like.items()
        }
        missing = {name: tensor.numel() for name, tensor in made.items()}
        for file, reads in itertools.groupby(plan_reads(like, self._stored), key=lambda read: read[0].file):
            data = memoryview(self._files[file])
            for extent, item in reads:
                part = read_part(extent, item.storage_offsets, item.lengths, self._reader(file, data))
                made[item.dest_index.fqn][slices(item.dest_offsets, item.lengths)] = part
                missing[item.dest_index.fqn] -= part.numel()
        for name, elements in missing.items():
            if elements:
                self._verify()
                raise StreamCorrupt(self._kind, f"{elements} elements of {name} are in none of the checkpoint's files")
        return made

    def read_whole(self) -> dict[str, torch.Tensor]:
        """Every tensor whole, on the CPU, by name. Raises StreamCorrupt."""
        return dict(self.read({name: torch.empty(size, device="meta") for name, size in self.shapes.items()}))

    def _extents(self, file: str) -> dict[str, Extent]:
        if isinstance(self._files, StoredFiles):
            header = self._files.header(file)
        else:
            data = memoryview(self._files[file])
            header = bytes(data[: header_length(bytes(data[:8]))])
        try:
            return extents(header, file)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StreamCorrupt(self._path(file), f"not a safetensors file: {error!r}") from error

    def _reader(self, file: str, data: memoryview) -> Callable[[int, memoryview], None]:
        start_of_values = header_length(bytes(data[:8]))

        def read_into(start: int, buffer: memoryview) -> None:
            part = data[start_of_values + start :][: len(buffer)]
            if len(part) < len(buffer):
                raise StreamCorrupt(self._path(file), "not a safetensors file: it ends within a tensor")
            buffer[:] = part

        return read_into

    def _verify(self) -> None:
        """Raises StreamCorrupt if a file is damaged: then that is why something seems to be missing."""
        for file in sorted({extent.file for blocks in self._stored.values() for extent in blocks}):
            self._files[file]

    def _path(self, file: str) -> str:
        return self._files.path(file) if isinstance(self._files, StoredFiles) else file


def plan_reads(
    like: Mapping[str, torch.Tensor], stored: Mapping[str, Sequence[Extent]]
) -> list[tuple[Extent, ReadItem]]:
    """Plans the reads that fill this rank's parts of `like`: each with the block that it reads, in the files' order.

    `stored` are the blocks of each tensor. Raises ValueError if they have another shape than the tensor of `like`.
    """
    metadata = Metadata(state_dict_metadata={name: _metadata(stored[name]) for name in like})
    at_place = {(name, extent.offsets): extent for name in like for extent in stored[name]}
    reads = []
    for item in create_default_local_load_plan(dict(like), metadata).items:
        offsets = item.storage_index.offset
        assert offsets is not None
        # A rank may hold no part of a small tensor.
        if math.prod(item.lengths):
            reads.append((at_place[item.storage_index.fqn, tuple(offsets)], item))
    return sorted(reads, key=lambda read: (read[0].file, read[0].start))


def slices(offsets: torch.Size, lengths: torch.Size) -> tuple[slice, ...]:
    """The index of a part."""
    return tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))


def _metadata(extents: Sequence[Extent]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=extents[0].dtype),
        size=_size(extents),
        chunks=[ChunkStorageMetadata(torch.Size(extent.offsets), torch.Size(extent.shape)) for extent in extents],
    )


def _size(extents: Sequence[Extent]) -> torch.Size:
    """Shape of the tensor of these blocks."""
    ends = ([at + length for at, length in zip(part.offsets, part.shape, strict=True)] for part in extents)
    return torch.Size([max(along) for along in zip(*ends, strict=True)])
