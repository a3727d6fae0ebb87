"""What a folder must hold to start a campaign from it: looked at before anything runs, without loading a model."""

import json
from pathlib import Path
from typing import Any

from millrace.errors import ModelFolderError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def check_model_folder(folder: Path) -> dict[str, Any]:
    """The content of config.json in a Hugging Face causal language model's folder.

    Raises ModelFolderError naming the first thing that is missing there.
    """
    if not folder.is_dir():
        raise ModelFolderError(f"model.path {str(folder)!r}: no such folder; expected a Hugging Face model folder")
    config = _read_config(folder / "config.json")
    if not any(match for pattern in _WEIGHT_FILES for match in folder.glob(pattern)):
        raise ModelFolderError(f"model.path {str(folder)!r}: no weights; expected *.safetensors files")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelFolderError(
            f"model.path {str(folder)!r}: no tokenizer; expected one of {', '.join(_TOKENIZER_FILES)}"
        )
    return config


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFolderError(f"model.path {str(path.parent)!r}: no config.json; expected a model folder") from error
    except ValueError as error:
        raise ModelFolderError(f"model.path: {path} is not JSON: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelFolderError(f"model.path: {path} names no model_type; expected a Hugging Face model's config")
    return config
