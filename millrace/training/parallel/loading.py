"""The start model of several ranks: none of them ever holds it whole.

    config.json, headers of the weight files ─► the model without values, checked ─► `shard` ─► `fill`: every rank

    fill   memory for this rank's parts ─► plan: which bytes of which file they are ─► read, part by part
           adapters: drawn whole, layer by layer, as a single rank draws them ─► this rank's part

torch.distributed.checkpoint makes the plan. transformers knows which stored tensors make up one of the model: many
families store each expert separately. Ranks wait for each other once, to learn whether all could read.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from millrace.errors import ModelFolderError, from_json, to_json
from millrace.models.loading import NOT_TIED, check_loads, refuse_not_finite, refused_in_a_sentence
from millrace.models.weight_files import weight_files
from millrace.training.checkpoints.files import Extent, extents, header_length, read_part
from millrace.training.checkpoints.reading import plan_reads, slices
from millrace.training.lora import adapters, base_name, drawn, is_adapter, parts
from millrace.training.parallel.messages import exchange
from millrace.training.parallel.ranks import Ranks, local
from millrace.training.policy import PackedPolicy

Stored = Mapping[str, list[Extent]]
"""The blocks in the weight files that make up each tensor of the model."""


class StartModel:
    """The model in `folder`, in `dtype`, for several ranks. `seed` is the run's; adapters are drawn from it.

    Every rank makes the same one. Raises ModelFolderError.
    """

    def __init__(self, folder: Path, dtype: str, seed: int) -> None:
        self._folder = folder
        self._dtype = dtype
        self._seed = seed
        files = weight_files(folder)
        with refused_in_a_sentence(folder):
            self._headers = {path.name: _header(path) for path in files}
            self._in_files = {
                name: extent for file, header in self._headers.items() for name, extent in extents(header, file).items()
            }
        self.stored: Stored = {}
        """Known once `empty` was called."""
        self._dtypes: Mapping[str, torch.dtype] = {}

    def empty(self) -> PreTrainedModel:
        """The model on the meta device, without values but for its buffers.

        Raises ModelFolderError if the weight files have other tensors than the model.
        """
        headers = {
            name: torch.empty(extent.shape, dtype=extent.dtype, device="meta")
            for name, extent in self._in_files.items()
        }
        model = check_loads(self._folder, headers, self._dtype)
        # Files may hold both of two tied tensors: `fill` compares their values.
        model.tie_weights()
        for module in model.modules():
            if any(True for _ in module.buffers(recurse=False)):
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, torch.empty_like(buffer, device="cpu"))
                # Computed on the CPU, as for a single rank. It leaves parameters alone, which count as loaded.
                model._init_weights(module)  # type: ignore[no-untyped-call]
        self.stored = _stored_as(model, self._in_files, self._folder)
        named = model.named_parameters(remove_duplicate=False)
        self._dtypes = {name: parameter.dtype for name, parameter in named}
        return model

    @torch.no_grad()
    def fill(self, policy: PackedPolicy, ranks: Ranks) -> None:
        """Gives this rank's part of `policy` its values; its model is from `empty`, and is sharded. All ranks call it.

        Raises ModelFolderError, on every rank, if one reads a value that is not finite, or tied tensors that differ.
        """
        policy._apply(  # type: ignore[no-untyped-call]
            lambda tensor: torch.empty_like(tensor, device=ranks.device) if tensor.is_meta else tensor
        )
        # Each use of a shared parameter has got its own memory.
        policy.model.tie_weights()
        problem = {}
        try:
            self._read(policy.model)
        except ModelFolderError as error:
            problem = to_json(error)
        problems = [json.loads(text) for text in exchange(json.dumps(problem), ranks.size)]
        for problem in filter(None, problems):
            raise from_json(problem)
        if layers := adapters(policy.model):
            torch.manual_seed(self._seed)
            for layer in layers.values():
                for parameter, values in zip(parts(layer)[:2], drawn(layer), strict=True):
                    local(parameter).copy_(_own_part(values, parameter))

    def _read(self, model: PreTrainedModel) -> None:
        """Reads this rank's part of every parameter of the base model."""
        named = model.named_parameters(remove_duplicate=False)
        parameters = {base_name(name): parameter for name, parameter in named if not is_adapter(name)}
        # A parameter has several names where layers share it, and its values may be stored under each of them.
        first_name: dict[torch.Tensor, str] = {}
        for name in self.stored:
            first_name.setdefault(parameters[name], name)
        names = set(first_name.values())
        for further, like in (
            (False, {name: parameters[name] for name in self.stored if name in names}),
            (True, {name: parameters[name] for name in self.stored if name not in names}),
        ):
            unread = {name: local(parameter).numel() for name, parameter in like.items()}
            for name, index, part in self._parts(like):
                target = local(like[name])[index]
                if further and not torch.equal(target, part.to(target)):
                    raise ModelFolderError(NOT_TIED, file=self._folder)
                target.copy_(part)
                unread[name] -= part.numel()
            assert not any(unread.values()), unread

    def _parts(self, like: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, tuple[slice, ...], torch.Tensor]]:
        """Reads this rank's parts of `like`. Yields (name, index within this rank's part, values)."""
        for path, reads in itertools.groupby(plan_reads(like, self.stored), lambda read: self._folder / read[0].file):
            with path.open("rb") as file:
                read_into = _reader(file, len(self._headers[path.name]))
                for extent, item in reads:
                    name = item.dest_index.fqn
                    part = read_part(extent, item.storage_offsets, item.lengths, read_into)
                    # In the model's dtype first: that of trained parameters may be wider.
                    part = part.to(self._dtypes[name])
                    refuse_not_finite(self._folder, name, part)
                    yield name, slices(item.dest_offsets, item.lengths), part


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        start = file.read(8)
        return start + file.read(header_length(start) - len(start))


def _reader(file: BinaryIO, start_of_values: int) -> Callable[[int, memoryview], None]:
    def read_into(start: int, buffer: memoryview) -> None:
        file.seek(start_of_values + start)
        if file.readinto(buffer) < len(buffer):  # type: ignore[attr-defined]
            raise ModelFolderError("it ends within a tensor", file=file.name, expected="the whole file")

    return read_into


def _stored_as(model: PreTrainedModel, in_files: Mapping[str, Extent], folder: Path) -> Stored:
    """The blocks of each tensor of `model`, by the names and offsets that transformers gives those of the files."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    expected = model.state_dict()
    stored: dict[str, list[Extent]] = defaultdict(list)
    merged: dict[str, dict[str, list[Extent]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(in_files, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if target not in expected and name in expected:
            target, pattern = name, None
        if target not in expected:
            # `check_loads` has refused all but those that transformers ignores.
            continue
        if pattern is None:
            stored[target].append(in_files[name])
        else:
            merged[target][pattern].append(in_files[name])
    for target, by_pattern in merged.items():
        converter = next(each for each in converters if set(by_pattern) <= set(each.source_patterns))
        stored[target] = list(_merged(converter, by_pattern, target, folder))
    return stored


def _merged(
    converter: WeightConverter, by_pattern: Mapping[str, list[Extent]], target: str, folder: Path
) -> Iterator[Extent]:
    """The blocks of a merged tensor: experts are stacked along dimension 0, their matrices joined along dimension 1."""
    operations = [type(operation) for operation in converter.operations]
    if operations not in ([MergeModulelist], [MergeModulelist, Concatenate]):
        names = ", ".join(operation.__name__ for operation in operations)
        read = f"{target} is made of stored tensors by {names}, which several ranks can't read by parts"
        raise ModelFolderError(read, file=folder, expected="a folder written by transformers 5, or a single rank")
    begin = 0
    for pattern in converter.source_patterns:
        for number, extent in enumerate(by_pattern[pattern]):
            offsets = (number, begin, *(0 for _ in extent.shape[1:]))
            yield replace(extent, offsets=offsets, shape=(1, *extent.shape))
        begin += by_pattern[pattern][0].shape[0]


def _own_part(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of whole `values`, as it has one of `parameter`."""
    assert isinstance(parameter, DTensor)
    lengths, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return values[slices(torch.Size(offsets), torch.Size(lengths))]
