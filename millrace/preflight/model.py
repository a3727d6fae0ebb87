"""Checks whether a campaign can train a model, before anything runs and without loading it."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.schema import ModelConfig
from configs.training import TrainingConfig
from millrace.errors import InputError, ModelFolderError
from millrace.models.supported import FAMILIES, check_trainable
from millrace.preflight.folder_files import read_object
from millrace.preflight.parallel_layout import check_layout
from millrace.prompts.packages import check_installed

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_SECTIONS = ("rope_parameters", "rope_scaling", "quantization_config")
_ABOVE_ZERO = ("rms_norm_eps", "rope_theta", "factor")


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
        check_installed("peft", "lora", f"training.lora.rank {training.lora.rank}")


def _check_frozen(model: Mapping[str, Any], training: TrainingConfig) -> None:
    frozen, layers = training.frozen_layers, model.get("num_hidden_layers")
    if layers is None:
        raise InputError(
            f"training.frozen_layers is {frozen} and the model's config.json has no num_hidden_layers; "
            "expected it there"
        )
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
        raise ModelFolderError(
            f"model.path {str(folder)!r}: no such folder; expected a Hugging Face model folder, or ORG/NAME of a hub"
        )
    config = read_object(folder / "config.json") if (folder / "config.json").is_file() else None
    if config is None:
        raise ModelFolderError(f"model.path {str(folder)!r}: no config.json; expected a model folder")
    _check_config(folder / "config.json", config)
    if not any(match for pattern in _WEIGHT_FILES for match in folder.glob(pattern)):
        raise ModelFolderError(f"model.path {str(folder)!r}: no weights; expected *.safetensors files")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelFolderError(
            f"model.path {str(folder)!r}: no tokenizer; expected one of {', '.join(_TOKENIZER_FILES)}"
        )
    return config


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelFolderError for a value of another type than the checks, and transformers, take it for."""
    if not isinstance(config.get("model_type"), str):
        raise ModelFolderError(f"model.path: {path} names no model_type; expected a Hugging Face model's config")
    for name in _SIZES:
        value = config.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ModelFolderError(f"model.path: {path} says {name} {value!r}; expected a whole number above 0")
    for name in _SECTIONS:
        if not isinstance(config.get(name) or {}, dict):
            raise ModelFolderError(f"model.path: {path} says {name} {config[name]!r}; expected an object")
    for name, value in _numbers(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelFolderError(f"model.path: {path} says {name} {value}; expected a finite number")
        if name.rpartition(".")[2] in _ABOVE_ZERO and value <= 0:
            raise ModelFolderError(f"model.path: {path} says {name} {value}; expected a number above 0")
    heads, of_keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads is not None and of_keys is not None and heads % of_keys:
        raise ModelFolderError(
            f"model.path: {path} says num_attention_heads {heads} and num_key_value_heads {of_keys}; expected the "
            "second to divide the first"
        )


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(dotted key, number) for each number in `values`, and below."""
    left: list[tuple[str, Any]] = list(values.items())
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left.extend((f"{name}.{key}", below) for key, below in value.items())
        elif isinstance(value, list):
            left.extend((name, below) for below in value)
        elif type(value) in (int, float):
            yield name, value
