"""Checks whether a campaign can train a model, before anything runs and without loading it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.schema import ModelConfig
from configs.training import TrainingConfig
from millrace.errors import InputError, ModelFolderError
from millrace.models.supported import FAMILIES, check_trainable
from millrace.preflight.parallel_layout import check_layout
from millrace.prompts.extras import check_installed
from storage.json_text import parse_json

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def read_model(model: ModelConfig) -> Mapping[str, Any]:
    """config.json of the folder `model.path`, or the keys needed here of the one that bootstrap would write.

    Raises ModelFolderError, naming the first thing missing from the folder.
    """
    if model.path is not None:
        return _read_folder(Path(model.path).expanduser())
    return {
        "model_type": "llama",
        "num_attention_heads": model.bootstrap.num_heads,
        "intermediate_size": model.bootstrap.intermediate_size,
        "num_hidden_layers": model.bootstrap.num_layers,
    }


def check_training(model: Mapping[str, Any], training: TrainingConfig, *, on_this_host: bool) -> None:
    """Raises InputError if the trainer can't train the model as configured. `model`: content of its config.json.

    `on_this_host`: the trainer runs here, so this host's GPUs are checked. Otherwise the stage checks its own host.
    """
    check_trainable(model)
    gpus = None
    if training.device == "cuda" and on_this_host:
        # Imported late: torch is slow to import, and needed only where there are GPUs.
        import torch

        gpus = torch.cuda.device_count()
    check_layout(model, training.parallel, gpus=gpus)
    if not FAMILIES[model["model_type"]].experts:
        for key in ("router_replay", "router_aux_loss_coefficient"):
            if value := getattr(training, key):
                raise InputError(
                    f"training.{key} is {json.dumps(value)} and a {model['model_type']} model has no experts; "
                    f"expected {'false' if value is True else 0} (docs/models.md)"
                )
    if training.frozen_layers:
        _check_frozen(model, training)
    if training.lora.rank is not None:
        check_installed("peft", "lora", f"training.lora.rank is {training.lora.rank}")


def _check_frozen(model: Mapping[str, Any], training: TrainingConfig) -> None:
    frozen, layers = training.frozen_layers, model["num_hidden_layers"]
    if frozen > layers:
        raise InputError(
            f"training.frozen_layers is {frozen} and the model has {layers} layers; expected at most {layers}"
        )
    if frozen == layers and training.lora.rank is not None:
        raise InputError(
            f"training.frozen_layers is {frozen}, the model has {layers} layers and training.lora.rank is "
            f"{training.lora.rank}; expected fewer frozen layers, because adapters are in the others"
        )


def _read_folder(folder: Path) -> dict[str, Any]:
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
    if not path.is_file():
        raise ModelFolderError(f"model.path {str(path.parent)!r}: no config.json; expected a model folder")
    try:
        config = parse_json(path.read_bytes())
    except OSError as error:
        raise ModelFolderError(f"model.path: {path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelFolderError(f"model.path: {path} is not JSON: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelFolderError(f"model.path: {path} names no model_type; expected a Hugging Face model's config")
    return config
