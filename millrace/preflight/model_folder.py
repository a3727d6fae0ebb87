"""Checks that transformers will load a model folder whole, before anything of a run exists, and without loading it.

    config.json ─► the model, without values ─┐
    headers of the weight files ──────────────┴─► transformers' own report of a load: no tensor missing, left over, or
                                                  of another shape
    tokenizer ─► it ends texts, and knows no token that the model does not
    weight files ─► finite values, and tied layers are equal, where they are no more than 4 GiB; a stage checks larger
                    ones when it loads them

It runs in a process of its own, `python -m millrace.preflight.model_folder`, with a limit on its memory: transformers
takes seconds to import, and what it does with a damaged folder is not known.
"""

import json
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.errors import ModelFolderError
from millrace.preflight.child import serve
from millrace.preflight.model_files import weight_files

MODULE = "millrace.preflight.model_folder"
_LARGEST_LOOKED_THROUGH = 4 << 30
"""Bytes of weights whose values are looked at before the start: a few seconds."""
_MEMORY = 2 << 30
"""Bytes that the process may take beyond what its imports took."""


def answer(question: Mapping[str, str]) -> None:
    """The child process. Raises the InputError of `check_model_folder`."""
    # Imported before the limit is set, which counts from there.
    import millrace.models.loading  # noqa: F401

    folder = Path(question["folder"])
    most = _data_bytes() + _MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        check_model_folder(folder)
    except MemoryError:
        raise ModelFolderError(
            file=folder,
            read=f"to look at it takes more than {_MEMORY / 2**30:.0f} GiB of memory",
            expected="a model folder",
        ) from None


def check_model_folder(folder: Path) -> None:
    """Raises ModelFolderError about the first thing that is wrong. Imports transformers.

    Call `check_folder_files` and `check_weight_files` first.
    """
    from millrace.models.loading import check_loads, end_token_ids, load_tokenizer

    files = weight_files(folder)
    check_loads(folder, _empty_tensors(files))
    tokenizer = load_tokenizer(folder)
    size = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    if size is not None:
        # Tokens added beyond the vocabulary may be there for images: what a prompt holds is checked with the prompts.
        if tokenizer.vocab_size > size:
            raise ModelFolderError(
                file=folder,
                read=f"its tokenizer has {tokenizer.vocab_size:,} tokens, its model knows {size:,}",
                expected="a tokenizer of the model's own",
            )
        ends = {f"eos_token {token}": token for token in end_token_ids(folder, tokenizer)}
        named = {"bos_token": tokenizer.bos_token_id, "pad_token": tokenizer.pad_token_id, **ends}
        for name, token in named.items():
            if token is not None and token >= size:
                raise ModelFolderError(
                    file=folder,
                    read=f"its tokenizer's {name} is token {token}, its model knows {size:,}",
                    expected="a tokenizer of the model's own",
                )
    if sum(path.stat().st_size for path in files) <= _LARGEST_LOOKED_THROUGH:
        _check_finite(files)
        _check_tied(folder, files)


def _empty_tensors(files: list[Path]) -> Mapping[str, Any]:
    """The tensors of the files, without values."""
    import torch
    from safetensors import safe_open

    tensors = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 — it is no mapping
                tensors[name] = torch.empty(file.get_slice(name).get_shape(), device="meta")
    return tensors


def _check_finite(files: list[Path]) -> None:
    """Raises ModelFolderError for a value that is not finite. Holds one tensor at a time, as a view of its file."""
    from safetensors import safe_open

    from millrace.models.loading import is_finite

    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 — it is no mapping
                if not is_finite(file.get_tensor(name)):
                    raise ModelFolderError(
                        file=path, read=f"{name} holds values that are not finite", expected="numbers"
                    )


def _check_tied(folder: Path, files: list[Path]) -> None:
    """Raises ModelFolderError for an output layer that is not the embedding, though config.json says that it is."""
    from safetensors import safe_open

    from millrace.models.loading import NOT_TIED, is_tied

    found = []
    for path in files:
        with safe_open(path, framework="pt") as file:
            held = set(file.keys())
            found += [file.get_tensor(name) for name in ("model.embed_tokens.weight", "lm_head.weight") if name in held]
    if len(found) == 2 and is_tied(folder) and not bool((found[0] == found[1]).all()):
        raise ModelFolderError(NOT_TIED, file=folder)


def _data_bytes() -> int:
    """What the limit counts of this process now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


if __name__ == "__main__":
    serve(answer)
