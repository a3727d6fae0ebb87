"""Checks that transformers will load a model folder whole, before anything of a run exists, and without loading it.

    here   settings: no pipe to wait at, no adapter in place of a model, no code, valid JSON
           weights:  index ─► files ─► headers ─► all tensors that the index names, as many layers as config.json says
    child  config.json ─► the model, without values ─┐
           headers of the weight files ──────────────┴─► transformers' report of a load: no tensor missing, left over
                                                         or of another shape
           tokenizer ─► it ends texts, and knows no token that the model does not
           weight files ─► finite values, and tied layers are equal, where they are no more than 4 GiB; a stage checks
                           larger ones when it loads them

The child process, `python -m millrace.preflight.model_folder`, has a limit on its memory: transformers takes seconds to
import, and may do anything with a damaged folder. This process does not import torch.
"""

import json
import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from millrace.errors import ModelFolderError
from millrace.models.supported import FAMILIES
from millrace.models.weight_files import INDEX, WEIGHTS, read_index, read_object, require, weight_files
from millrace.preflight.child import serve

MODULE = "millrace.preflight.model_folder"
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..+")
_LARGEST_SCANNED = 4 << 30
"""Bytes of weights whose values are checked before the start: a few seconds."""
_CHILD_MEMORY = 2 << 30
"""Bytes that the child process may take beyond what its imports took, and beyond the weight files that it scans."""
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_SETTINGS = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.json",
)
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_ATTENTIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
"""Those that PyTorch or transformers bring. Any other name is a repository of kernels."""


def check_folder_files(folder: Path, model: Mapping[str, Any]) -> None:
    """Raises ModelFolderError, naming the first file or setting that can't be used. `model`: content of config.json."""
    for path in (path for pattern in _FILES for path in sorted(folder.glob(pattern))):
        require(path.is_file(), "no regular file", "one, or none of this name", file=path)
    is_adapter = (folder / "adapter_config.json").exists()
    require(not is_adapter, "it is an adapter of another model", "the whole model, merged", file=folder)
    config, weights = folder / "config.json", model.get("transformers_weights")
    require(weights is None, repr(weights), f"the weights in {WEIGHTS}", file=config, key="transformers_weights")
    attention = model.get("attn_implementation", model.get("_attn_implementation"))
    expected = f"none, or one of {', '.join(_ATTENTIONS)}"
    fine = attention in (None, *_ATTENTIONS)
    require(fine, repr(attention), expected, file=config, key="attn_implementation")
    settings = {name: read_object(folder / name) for name in _SETTINGS if (folder / name).exists()}
    ends, size = settings.get("generation_config.json", {}).get("eos_token_id"), model.get("vocab_size")
    expected = "token ids" if size is None else f"token ids below vocab_size, {size:,}"
    for token in ends if isinstance(ends, list) else [] if ends is None else [ends]:
        fine = type(token) is int and token >= 0 and (size is None or token < size)
        require(fine, ends, expected, file=folder / "generation_config.json", key="eos_token_id")


def read_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor, by its file's header. Raises ModelFolderError, naming a file that is damaged."""
    return {name: shape for path in weight_files(folder) for name, shape in _read_header(path).items()}


def check_weight_files(folder: Path, model: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the shape of each tensor. Raises ModelFolderError, naming file or tensor, if one is damaged or missing.

    `model` is the content of config.json.
    """
    index, shapes = read_index(folder), read_shapes(folder)
    for name in sorted(index.keys() - shapes.keys()):
        raise ModelFolderError(file=folder / INDEX, read=f"{index[name]} does not hold {name}", expected="it there")
    layers = {int(match[1]) for name in shapes if (match := _LAYER.fullmatch(name))}
    count = model.get("num_hidden_layers")
    if model["model_type"] in FAMILIES and isinstance(count, int) and len(layers) < count:
        missing = next(number for number in range(count) if number not in layers)
        expected = f"{count} layers, the num_hidden_layers of config.json"
        raise ModelFolderError(file=folder, read=f"its weight files lack layer {missing}", expected=expected)
    return shapes


def _read_header(path: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor in a weight file."""
    expected = "a whole file of weights in safetensors format"
    require(path.is_file(), "no such file", expected, file=path)
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 — not a mapping
            for name, part in slices.items():
                read = f"{name} holds numbers of type {part.get_dtype()}"
                require(part.get_dtype() in _FLOATS, read, f"one of {', '.join(sorted(_FLOATS))}", file=path)
            return {name: part.get_shape() for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(file=path, read=str(error), expected=expected) from error


def answer(question: Mapping[str, str]) -> None:
    """The child process. Raises the InputError of `check_model_folder`."""
    # Imported before the limit is set, which counts from there.
    import millrace.models.loading  # noqa: F401

    folder = Path(question["folder"])
    lines = Path("/proc/self/status").read_text().splitlines()
    now = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
    # An open weight file counts as memory.
    limit = now + _CHILD_MEMORY + sum(path.stat().st_size for path in _scanned_files(folder))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        check_model_folder(folder)
    except MemoryError:
        read = f"checking it takes more than {_CHILD_MEMORY / 2**30:.0f} GiB of memory"
        raise ModelFolderError(file=folder, read=read, expected="a model folder") from None


def check_model_folder(folder: Path) -> None:
    """Raises ModelFolderError about the first mistake. Imports transformers.

    Call `check_folder_files` and `check_weight_files` first.
    """
    import torch

    from millrace.models.loading import NOT_TIED, check_loads, end_token_ids, is_finite, is_tied, load_tokenizer

    check_loads(folder, {name: torch.empty(shape, device="meta") for name, shape in read_shapes(folder).items()})
    tokenizer = load_tokenizer(folder)
    size = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    if size is not None:
        # Tokens added beyond the vocabulary may be there for images: those in prompts are checked with the prompts.
        limit = f"its model knows {size:,}"
        expected = "a tokenizer of the model's own"
        read = f"its tokenizer has {tokenizer.vocab_size:,} tokens, {limit}"
        require(tokenizer.vocab_size <= size, read, expected, file=folder)
        ends = {f"eos_token {token}": token for token in end_token_ids(folder, tokenizer)}
        special = {"bos_token": tokenizer.bos_token_id, "pad_token": tokenizer.pad_token_id, **ends}
        for name, token in special.items():
            read = f"its tokenizer's {name} is token {token}, {limit}"
            require(token is None or token < size, read, expected, file=folder)
    outer: list[torch.Tensor] = []
    for path in _scanned_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 — not a mapping
                # One tensor at a time, as a view of its file.
                tensor = file.get_tensor(name)
                require(is_finite(tensor), f"{name} holds values that are not finite", "numbers", file=path)
                if name in ("model.embed_tokens.weight", "lm_head.weight"):
                    outer.append(tensor)
    if len(outer) == 2 and is_tied(folder) and not bool((outer[0] == outer[1]).all()):
        raise ModelFolderError(NOT_TIED, file=folder)


def _scanned_files(folder: Path) -> list[Path]:
    """Return the weight files if they are small enough for a look at their values; otherwise none."""
    files = weight_files(folder)
    return files if sum(path.stat().st_size for path in files) <= _LARGEST_SCANNED else []


if __name__ == "__main__":
    serve(answer)
