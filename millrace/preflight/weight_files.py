"""Whether the weight files of a model folder are whole, by their headers: nothing is loaded, and torch is not imported.

index ─► files of the folder ─► headers ─► all tensors that it names? ─► every layer with the same tensors?

`millrace.preflight.model_folder` has transformers itself compare them with the model afterwards.
"""

import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from millrace.errors import ModelFolderError
from millrace.models.supported import FAMILIES
from storage.json_text import parse_json

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")

_LARGEST_HEADER = 32 << 20
"""Bytes. The header of the largest mixture in one file has a few million."""
_LARGEST_INDEX = 64 << 20
"""Bytes. That of the largest mixture has some ten million."""
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

Shapes = dict[str, list[int]]


def check_weight_files(folder: Path, model: Mapping[str, Any], *, loaded_here: bool = True) -> None:
    """Raises ModelFolderError, naming file or tensor, unless the folder has all weights that its config.json asks for.

    `model` is the content of config.json. The layers of mixtures of experts are counted and not compared: they may
    differ. `loaded_here`: a stage on this machine will load them, so they have to fit into its memory.
    """
    shapes: Shapes = {}
    named = _named_files(folder)
    for name in sorted(set(named.values())) or [_WEIGHTS]:
        shapes |= _header(folder / name)
    if lacking := sorted(named.keys() - shapes.keys()):
        raise ModelFolderError(
            f"{folder / _INDEX}: says that {named[lacking[0]]} holds {lacking[0]}, which it does not"
        )
    _check_fits(folder, shapes)
    kind = model["model_type"]
    if kind not in FAMILIES:
        return
    if not FAMILIES[kind].experts:
        _check_embedding(folder, model, shapes)
    layers = _layers(folder, model, shapes)
    if not FAMILIES[kind].experts:
        _compare_layers(folder, layers)


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads the weights from. Raises ModelFolderError for a bad index."""
    return [folder / name for name in sorted(set(_named_files(folder).values())) or [_WEIGHTS]]


def _named_files(folder: Path) -> dict[str, str]:
    """Tensor → file, by the index; empty if the weights are in one file, which transformers prefers to an index."""
    index = folder / _INDEX
    return _read_index(index) if index.exists() and not (folder / _WEIGHTS).is_file() else {}


def _read_index(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ModelFolderError(f"{path}: is no file; expected the index of the weight files")
    if (size := path.stat().st_size) > _LARGEST_INDEX:
        raise ModelFolderError(f"{path}: has {size:,} bytes; expected at most {_LARGEST_INDEX:,}")
    try:
        index = parse_json(path.read_bytes())
        named = index["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFolderError(f"{path}: can't be read ({error!r}); expected an object with a weight_map") from error
    if not isinstance(named, dict) or not named:
        raise ModelFolderError(f"{path}: its weight_map is no object of tensors and files")
    if not isinstance(index.get("metadata"), dict):
        raise ModelFolderError(f"{path}: names no metadata; expected an object, which transformers reads")
    for tensor, file in named.items():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
            raise ModelFolderError(f"{path}: {tensor} is in {file!r}; expected the name of a file in the same folder")
    return named


def _header(path: Path) -> Shapes:
    if not path.is_file():
        raise ModelFolderError(f"{path}: no such file; expected weights in safetensors format")
    try:
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
        if length > _LARGEST_HEADER:
            raise ModelFolderError(
                f"{path}: not a whole file of weights in safetensors format: its header claims {length:,} bytes; "
                f"expected at most {_LARGEST_HEADER:,}"
            )
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 — it is no mapping
            if odd := next((name for name, one in slices.items() if one.get_dtype() not in _FLOATS), None):
                raise ModelFolderError(
                    f"{path}: {odd} holds numbers of type {slices[odd].get_dtype()}; expected one of "
                    f"{', '.join(sorted(_FLOATS))}"
                )
            return {name: one.get_shape() for name, one in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(f"{path}: not a whole file of weights in safetensors format: {error}") from error


def _check_fits(folder: Path, shapes: Shapes) -> None:
    """In two bytes per number the weights have to fit into this machine's memory: the least that any process holds."""
    needed = 2 * sum(math.prod(shape) for shape in shapes.values())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ModelFolderError(
            f"{folder}: its weights take at least {needed / 2**30:,.1f} GiB and this machine has "
            f"{memory / 2**30:,.1f} GiB of memory; expected a smaller model, or a larger machine"
        )


def _check_embedding(folder: Path, model: Mapping[str, Any], shapes: Shapes) -> None:
    found = [(name, shape) for name, shape in shapes.items() if name.endswith("embed_tokens.weight")]
    if not found:
        raise ModelFolderError(f"{folder}: its weight files lack model.embed_tokens.weight")
    expected = [model.get("vocab_size"), model.get("hidden_size")]
    for name, shape in found:
        if None not in expected and shape != expected:
            raise ModelFolderError(
                f"{folder}: {name} has the shape {shape}, but config.json says vocab_size {expected[0]} and "
                f"hidden_size {expected[1]}"
            )


def _layers(folder: Path, model: Mapping[str, Any], shapes: Shapes) -> list[dict[str, list[int]]]:
    """The tensors of each layer. Raises ModelFolderError unless there are as many as config.json says."""
    layers: defaultdict[int, dict[str, list[int]]] = defaultdict(dict)
    for name, shape in shapes.items():
        if match := _LAYER.fullmatch(name):
            layers[int(match[1])][match[2]] = shape
    count = model.get("num_hidden_layers")
    if not isinstance(count, int):
        return []
    if len(layers) < count:
        first = next(number for number in range(count) if number not in layers)
        raise ModelFolderError(
            f"{folder}: config.json says num_hidden_layers {count}, but the weight files lack layer {first}"
        )
    return [layers[number] for number in range(count)]


def _compare_layers(folder: Path, layers: Sequence[dict[str, list[int]]]) -> None:
    """Layers of one kind of decoder have tensors of the same names and shapes."""
    every: dict[str, list[int]] = {}
    for layer in layers:
        every = layer | every
    for number, layer in enumerate(layers):
        for name, shape in every.items():
            if (found := layer.get(name)) is None:
                raise ModelFolderError(f"{folder}: layer {number} lacks {name}, which other layers have")
            if found != shape:
                raise ModelFolderError(
                    f"{folder}: {name} of layer {number} has the shape {found}, of another layer {shape}"
                )
