"""Whether the files of a model folder are what transformers takes them for, before it reads them: no pipe to wait at,
no adapter in place of a model, no code, no JSON that is none.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.errors import ModelFolderError
from storage.json_text import parse_json

_LARGEST = {"tokenizer.json": 512 << 20, "vocab.json": 64 << 20}
_LARGEST_OTHER = 16 << 20
"""Bytes. Files of settings have a few thousand."""
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
                raise ModelFolderError(f"{path}: is no regular file; expected one, or none of this name")
    if (folder / _ADAPTER).exists():
        raise ModelFolderError(
            f"{folder}: holds {_ADAPTER}, so it is an adapter of another model; expected the whole model, merged"
        )
    if (elsewhere := model.get("transformers_weights")) is not None:
        raise ModelFolderError(
            f"{folder}: config.json says transformers_weights {elsewhere!r}; expected the weights in model.safetensors"
        )
    attention = model.get("attn_implementation", model.get("_attn_implementation"))
    if attention is not None and attention not in _IN_PYTORCH:
        raise ModelFolderError(
            f"{folder}: config.json says attn_implementation {attention!r}; expected none, or one of "
            f"{', '.join(_IN_PYTORCH)}"
        )
    found = {name: read_object(folder / name) for name in _OBJECTS if (folder / name).exists()}
    _check_ends(folder, model, found.get("generation_config.json", {}))
    _check_numbers(folder / "tokenizer.json", found.get("tokenizer.json", {}))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of the folder. Raises ModelFolderError."""
    if not path.is_file():
        raise ModelFolderError(f"{path}: no such file; expected a JSON object")
    try:
        if (size := path.stat().st_size) > (most := _LARGEST.get(path.name, _LARGEST_OTHER)):
            raise ModelFolderError(f"{path}: has {size:,} bytes; expected at most {most:,}")
        values = parse_json(path.read_bytes())
    except OSError as error:
        raise ModelFolderError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelFolderError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelFolderError(f"{path}: holds no JSON object")
    return values


def _check_ends(folder: Path, model: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
    """The tokens that end a response are numbers of the model's vocabulary."""
    size = model.get("vocab_size")
    found = generation.get("eos_token_id")
    for token in found if isinstance(found, list) else [] if found is None else [found]:
        if type(token) is not int or token < 0:
            raise ModelFolderError(f"{folder / 'generation_config.json'}: eos_token_id is {found}; expected token ids")
        if size is not None and token >= size:
            raise ModelFolderError(
                f"{folder / 'generation_config.json'}: eos_token_id is {token}, but the model knows {size:,} tokens"
            )


def _check_numbers(path: Path, tokenizer: Mapping[str, Any]) -> None:
    """The numbers of the tokenizer's tokens are such that a table of them fits into memory."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict):
        return
    if not vocabulary:
        raise ModelFolderError(f"{path}: its vocabulary is empty; expected tokens and their numbers")
    for token, number in vocabulary.items():
        if type(number) is not int or not 0 <= number < _MOST_TOKENS:
            raise ModelFolderError(
                f"{path}: token {token[:50]!r} has the number {number!r}; expected one below {_MOST_TOKENS:,}"
            )
