"""Tensors out of a checkpoint written by any number of ranks: whole, or the blocks of the reader's own layout.

    headers of a kind's files ─► blocks in the store ─┐
    the reader's tensors ─────────────────────────────┴─► plan: which part of which block goes where
    each file in the plan, verified whole ─► its parts ─► copies on the CPU ─► into the reader's tensors

torch.distributed.checkpoint makes the plan. The reader's tensors change only after everything was read.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

import safetensors
import safetensors.torch
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
from millrace.training.checkpoints.files import Extent, extents, header_length
from millrace.training.checkpoints.names import kind_of
from millrace.training.parallel.ranks import local
from storage.checkpoints import Checkpoint, load_file
from storage.errors import NotInStore, StreamCorrupt
from storage.stores.base import Store

_HEADER_READS = 5


class StoredFiles(Mapping[str, bytes]):
    """The files of a checkpoint by name, each loaded from the store on access, and verified.

    Access raises StreamCorrupt if the file is damaged or missing.
    """

    def __init__(self, store: Store, checkpoint: Checkpoint) -> None:
        self._store = store
        self._refs = checkpoint.files

    def __getitem__(self, name: str) -> bytes:
        return load_file(self._store, self._refs[name])

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

    def __init__(self, files: Mapping[str, bytes], kind: str) -> None:
        self._files = files
        self._kind = kind
        self._file_of: dict[tuple[str, tuple[int, ...]], str] = {}
        extents_of: dict[str, list[Extent]] = defaultdict(list)
        for name in sorted(files):
            if kind_of(name) == kind:
                for tensor, extent in self._extents(name).items():
                    extents_of[tensor].append(extent)
                    self._file_of[tensor, extent.offsets] = name
        self._metadata = {tensor: _metadata(parts) for tensor, parts in extents_of.items()}

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of each whole tensor, by name."""
        return {name: described.size for name, described in self._metadata.items()}

    def read(self, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies on the CPU, by name, of this rank's parts of `like`: blocks of DTensors, whole tensors otherwise.

        They have the stored dtypes. Raises WeightsMismatch if a tensor of `like` is missing in the checkpoint or has
        another shape there, and StreamCorrupt.
        """
        for name, tensor in like.items():
            if (shape := self.shapes.get(name)) != tensor.shape:
                self._verify()
                stored_shape = "no such tensor" if shape is None else f"one of {list(shape)}"
                raise WeightsMismatch(
                    f"the model has {name} of {list(tensor.shape)} and the checkpoint {stored_shape}; "
                    "expected a checkpoint of the same model"
                )
        made = {
            name: torch.empty(local(tensor).shape, dtype=self._metadata[name].properties.dtype)
            for name, tensor in like.items()
        }
        missing = {name: tensor.numel() for name, tensor in made.items()}
        for file, items in self._planned(like).items():
            blocks = self._load(file)
            for item in items:
                name = item.dest_index.fqn
                part = blocks[name][_slices(item.storage_offsets, item.lengths)]
                made[name][_slices(item.dest_offsets, item.lengths)] = part
                missing[name] -= part.numel()
        for name, elements in missing.items():
            if elements:
                self._verify()
                raise StreamCorrupt(self._kind, f"{elements} elements of {name} are in none of the checkpoint's files")
        return made

    def read_whole(self) -> dict[str, torch.Tensor]:
        """Every tensor whole, on the CPU, by name. Raises StreamCorrupt."""
        return self.read({name: torch.empty(size, device="meta") for name, size in self.shapes.items()})

    def _extents(self, file: str) -> dict[str, Extent]:
        if isinstance(self._files, StoredFiles):
            header = self._files.header(file)
        else:
            header = self._files[file][: header_length(self._files[file])]
        try:
            return extents(header)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StreamCorrupt(self._path(file), f"not a safetensors file: {error!r}") from error

    def _planned(self, like: Mapping[str, torch.Tensor]) -> dict[str, list[ReadItem]]:
        """The parts to read, by file."""
        items_of: dict[str, list[ReadItem]] = defaultdict(list)
        for item in create_default_local_load_plan(dict(like), Metadata(state_dict_metadata={**self._metadata})).items:
            if math.prod(item.lengths):
                offsets = item.storage_index.offset
                assert offsets is not None
                items_of[self._file_of[item.storage_index.fqn, tuple(offsets)]].append(item)
        return items_of

    def _load(self, file: str) -> dict[str, torch.Tensor]:
        try:
            blocks: dict[str, torch.Tensor] = safetensors.torch.load(self._files[file])
        except safetensors.SafetensorError as error:
            raise StreamCorrupt(self._path(file), f"not a safetensors file: {error}") from error
        return blocks

    def _verify(self) -> None:
        """Raises StreamCorrupt if a header is damaged: then that is why something seems to be missing."""
        for file in sorted(set(self._file_of.values())):
            self._load(file)

    def _path(self, file: str) -> str:
        return self._files.path(file) if isinstance(self._files, StoredFiles) else file


def _metadata(parts: list[Extent]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape)) for part in parts]
    ends = ([at + length for at, length in zip(part.offsets, part.shape, strict=True)] for part in parts)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=parts[0].dtype),
        size=torch.Size([max(along) for along in zip(*ends, strict=True)]),
        chunks=chunks,
    )


def _slices(offsets: torch.Size, lengths: torch.Size) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))
