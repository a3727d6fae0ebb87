"""Whether the files of a model folder are what transformers takes them for, before it reads them.

    settings   no pipe to wait at, no adapter in place of a model, no code, valid JSON
    weights    index ─► files ─► headers ─► all tensors that it names? ─► every layer with the same tensors?

Nothing is loaded, and torch is not imported. `millrace.preflight.model_folder` has transformers itself compare the
weights with the model afterwards.
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
_LARGEST = {"tokenizer.json": 512 << 20, "vocab.json": 64 << 20, _INDEX: 64 << 20}
_LARGEST_OTHER = 16 << 20
"""Bytes. Files of settings have a few thousand; the index of the largest mixture has some ten million."""
_LARGEST_HEADER = 32 << 20
"""Bytes. The header of the largest mixture in one file has a few million."""
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_OBJECTS = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.json",
)
_READ = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_MOST_TOKENS = 1 << 24
"""The largest vocabularies have some 300,000. The library `tokenizers` makes room for each number up to the highest."""
_ADAPTER = "adapter_config.json"
_IN_PYTORCH = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")


def check_folder_files(folder: Path, model: Mapping[str, Any]) -> None:
    """Raises ModelFolderError, naming the first file or setting that can't be used. `model`: content of config.json."""
    for pattern in _READ:
        for path in sorted(folder.glob(pattern)):
            if not path.is_file():
                raise ModelFolderError(file=path, read="no regular file", expected="one, or none of this name")
    if (folder / _ADAPTER).exists():
        raise ModelFolderError(
            file=folder,
            read=f"holds {_ADAPTER}, so it is an adapter of another model",
            expected="the whole model, merged",
        )
    config = folder / "config.json"
    if (elsewhere := model.get("transformers_weights")) is not None:
        raise ModelFolderError(
            file=config, key="transformers_weights", read=repr(elsewhere), expected=f"the weights in {_WEIGHTS}"
        )
    attention = model.get("attn_implementation", model.get("_attn_implementation"))
    if attention is not None and attention not in _IN_PYTORCH:
        raise ModelFolderError(
            file=config,
            key="attn_implementation",
            read=repr(attention),
            expected=f"none, or one of {', '.join(_IN_PYTORCH)}",
        )
    settings = {name: read_object(folder / name) for name in _OBJECTS if (folder / name).exists()}
    _check_ends(folder / "generation_config.json", model, settings.get("generation_config.json", {}))
    _check_numbers(folder / "tokenizer.json", settings.get("tokenizer.json", {}))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of the folder. Raises ModelFolderError."""
    expected = "a JSON object"
    if not path.is_file():
        raise ModelFolderError(file=path, read="no such file", expected=expected)
    try:
        if (size := path.stat().st_size) > (most := _LARGEST.get(path.name, _LARGEST_OTHER)):
            raise ModelFolderError(file=path, read=f"{size:,} bytes", expected=f"at most {most:,}")
        values = parse_json(path.read_bytes())
    except OSError as error:
        raise ModelFolderError(file=path, read=f"can't be read: {error.strerror}", expected=expected) from error
    except ModelFolderError:
        raise
    except ValueError as error:
        raise ModelFolderError(file=path, read=f"not JSON: {error}", expected=expected) from error
    if not isinstance(values, dict):
        raise ModelFolderError(file=path, read="no JSON object", expected=expected)
    return values


def _check_ends(path: Path, model: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
    """The tokens that end a response are numbers of the model's vocabulary."""
    size, ends = model.get("vocab_size"), generation.get("eos_token_id")
    for token in ends if isinstance(ends, list) else [] if ends is None else [ends]:
        if type(token) is not int or token < 0 or (size is not None and token >= size):
            expected = "token ids" if size is None else f"token ids below vocab_size, {size:,}"
            raise ModelFolderError(file=path, key="eos_token_id", read=ends, expected=expected)


def _check_numbers(path: Path, tokenizer: Mapping[str, Any]) -> None:
    """The numbers of the tokenizer's tokens are such that a table of them fits into memory."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict):
        return
    if not vocabulary:
        raise ModelFolderError(file=path, read="its vocabulary is empty", expected="tokens and their numbers")
    for token, number in vocabulary.items():
        if type(number) is not int or not 0 <= number < _MOST_TOKENS:
            raise ModelFolderError(
                file=path,
                read=f"token {token[:50]!r} has the number {number!r}",
                expected=f"one below {_MOST_TOKENS:,}",
            )


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
    if missing := sorted(named.keys() - shapes.keys()):
        raise ModelFolderError(
            file=folder / _INDEX, read=f"{named[missing[0]]} does not hold {missing[0]}", expected="it there"
        )
    if loaded_here:
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
    path = folder / _INDEX
    if not path.exists() or (folder / _WEIGHTS).is_file():
        return {}
    index = read_object(path)
    named = index.get("weight_map")
    if not isinstance(named, dict) or not named:
        raise ModelFolderError(file=path, key="weight_map", read="no object", expected="tensors and their files")
    if not isinstance(index.get("metadata"), dict):
        raise ModelFolderError(file=path, key="metadata", read="no object", expected="one, which transformers reads")
    for tensor, file in named.items():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
            raise ModelFolderError(
                file=path, read=f"{tensor} is in {file!r}", expected="the name of a file in the same folder"
            )
    return named


def _header(path: Path) -> Shapes:
    whole = "a whole file of weights in safetensors format"
    if not path.is_file():
        raise ModelFolderError(file=path, read="no such file", expected=whole)
    try:
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
        if length > _LARGEST_HEADER:
            raise ModelFolderError(file=path, read=f"its header claims {length:,} bytes", expected=whole)
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 — it is no mapping
            for name, part in slices.items():
                if (dtype := part.get_dtype()) not in _FLOATS:
                    raise ModelFolderError(
                        file=path,
                        read=f"{name} holds numbers of type {dtype}",
                        expected=f"one of {', '.join(sorted(_FLOATS))}",
                    )
            return {name: part.get_shape() for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(file=path, read=str(error), expected=whole) from error


def _check_fits(folder: Path, shapes: Shapes) -> None:
    """In two bytes per number the weights have to fit into this machine's memory: the least that any process holds."""
    needed = 2 * sum(math.prod(shape) for shape in shapes.values())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ModelFolderError(
            file=folder,
            read=(
                f"its weights take at least {needed / 2**30:,.1f} GiB and this machine has "
                f"{memory / 2**30:,.1f} GiB of memory"
            ),
            expected="a smaller model, or a larger machine",
        )


def _check_embedding(folder: Path, model: Mapping[str, Any], shapes: Shapes) -> None:
    embeddings = {name: shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight")}
    expected = [model.get("vocab_size"), model.get("hidden_size")]
    if not embeddings:
        raise ModelFolderError(file=folder, read="no embedding", expected="model.embed_tokens.weight in a weight file")
    for name, shape in embeddings.items():
        if None not in expected and shape != expected:
            raise ModelFolderError(
                file=folder,
                read=f"{name} has the shape {shape}",
                expected=f"{expected}, the vocab_size and hidden_size of config.json",
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
        missing = next(number for number in range(count) if number not in layers)
        raise ModelFolderError(
            file=folder,
            read=f"its weight files lack layer {missing}",
            expected=f"{count} layers, the num_hidden_layers of config.json",
        )
    return [layers[number] for number in range(count)]


def _compare_layers(folder: Path, layers: Sequence[dict[str, list[int]]]) -> None:
    """Layers of one kind of decoder have tensors of the same names and shapes."""
    every: dict[str, list[int]] = {}
    for layer in layers:
        every = layer | every
    for number, layer in enumerate(layers):
        for name, shape in every.items():
            if layer.get(name) != shape:
                found = f"has the shape {layer[name]}" if name in layer else "is missing"
                raise ModelFolderError(
                    file=folder, read=f"{name} of layer {number} {found}", expected=f"the shape {shape} of other layers"
                )
