"""Checks whether a campaign can train a model, before anything runs and without loading it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.errors import near_names
from configs.recipe import Recipe
from configs.schema import ModelConfig
from configs.training import ParallelConfig, TrainingConfig
from millrace.errors import InputError
from millrace.models.supported import FAMILIES, check_trainable
from millrace.models.weight_files import read_object, require
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
_LAYERS = "training.frozen_layers"
_TENSOR = "training.parallel.tensor"


def read_model(model: ModelConfig, recipe: Recipe) -> Mapping[str, Any]:
    """Return config.json of the folder `model.path`, or the keys needed here of the tiny one that `recipe` makes.

    Raises ModelFolderError, naming the first thing missing from the folder.
    """
    if model.path is None:
        return {
            "model_type": "llama",
            "num_attention_heads": recipe.num_heads,
            "intermediate_size": recipe.intermediate_size,
            "num_hidden_layers": recipe.num_layers,
        }
    return read_folder(Path(model.path).expanduser(), "model.path")


def read_folder(folder: Path, key: str) -> Mapping[str, Any]:
    """Return config.json of the model folder that the setting `key` names. Raises ModelFolderError as `read_model`."""
    path, subject = folder / "config.json", f"'{folder}', which"
    expected = near_names(folder) or "a Hugging Face model folder, or ORG/NAME of a hub"
    require(folder.is_dir(), f"{subject} is not a folder", expected, key=key)
    require(path.is_file(), f"{subject} has no config.json", "a model folder", key=key)
    config = read_object(path)
    _check_config(path, config)
    has_weights = any(match for pattern in _WEIGHT_FILES for match in folder.glob(pattern))
    require(has_weights, f"{subject} has no weights", "*.safetensors files", key=key)
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    require(has_tokenizer, f"{subject} has no tokenizer", f"one of {', '.join(_TOKENIZER_FILES)}", key=key)
    return config


def check_training(model: Mapping[str, Any], training: TrainingConfig) -> None:
    """Raises InputError if the trainer can't train the model as configured. `model`: content of its config.json."""
    check_trainable(model)
    check_layout(model, training.parallel, gpus=None)
    if not FAMILIES[model["model_type"]].experts:
        for key, expected in (("router_replay", "false"), ("router_aux_loss_coefficient", "0")):
            if value := getattr(training, key):
                read = f"{json.dumps(value)} and a {model['model_type']} model has no experts"
                raise InputError(read, key=f"training.{key}", expected=f"{expected} (docs/models.md)")
    frozen, layers, rank = training.frozen_layers, model.get("num_hidden_layers"), training.lora.rank
    if frozen and layers is None:
        read = f"{frozen} and the model's config.json has no num_hidden_layers"
        raise InputError(read, key=_LAYERS, expected="it there")
    if frozen and layers is not None and frozen > layers - (rank is not None):
        read = f"{frozen} and the model has {layers} layers"
        expected = f"at most {layers}, and fewer with training.lora.rank, because adapters are in the other layers"
        raise InputError(read, key=_LAYERS, expected=expected)
    if rank is not None:
        check_installed("peft", "lora", f"training.lora.rank {rank}")


def check_layout(model: Mapping[str, Any], parallel: ParallelConfig, *, gpus: int | None, hosts: int = 1) -> None:
    """Raises InputError if there are more ranks than GPUs, or tensor ranks don't divide a layer evenly.

    `model`: content of a model folder's config.json. `gpus`: GPUs of this host; None if the trainer runs on CPUs.
    `hosts`: number of hosts among which the data ranks are divided.
    """
    data, tensor = parallel.data, parallel.tensor
    if gpus is not None and data * tensor > gpus * hosts:
        subject = "this host has" if hosts == 1 else f"each of {hosts} hosts has"
        raise InputError(
            f"{data}, {_TENSOR} is {tensor}, and {subject} {gpus} GPUs",
            key="training.parallel.data",
            expected="data times tensor to be at most as many, for each rank needs one",
        )
    if tensor == 1:
        return
    if (family := FAMILIES.get(model.get("model_type", ""))) is not None and not family.tensor_parallel:
        read = f"{tensor}, and layers of a {family.model_type} model can't be divided among tensor ranks"
        raise InputError(read, key=_TENSOR, expected="1 (docs/models.md)")
    # Without grouped-query attention there are as many key heads as query heads, and config.json may omit them.
    heads = model.get("num_attention_heads")
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": model.get("num_key_value_heads") or heads,
        "intermediate_size": model.get("intermediate_size"),
    }
    for name, size in sizes.items():
        if not isinstance(size, int) or size % tensor:
            read = f"{tensor} and the model's {name} is {'missing' if size is None else size}"
            raise InputError(read, key=_TENSOR, expected="a divisor of it, or 1")


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelFolderError for a value of another type than the checks, and transformers, take it for."""
    kind = config.get("model_type")
    require(isinstance(kind, str), repr(kind), "that of a Hugging Face model", file=path, key="model_type")
    for name in _SIZES:
        size = config.get(name)
        fine = size is None or (type(size) is int and size > 0)
        require(fine, repr(size), "a whole number above 0", file=path, key=name)
    for section in ("", *_SECTIONS):
        values = (config.get(section) or {}) if section else config
        require(isinstance(values, dict), repr(values), "an object", file=path, key=section)
        for name in _ABOVE_ZERO:
            value = values.get(name, 1)
            fine = isinstance(value, int | float) and 0 < value < math.inf
            require(fine, value, "a number above 0", file=path, key=f"{section}.{name}".lstrip("."))
    heads, key_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads is not None and key_heads is not None:
        read = f"{key_heads} and num_attention_heads is {heads}"
        expected = "a divisor of num_attention_heads"
        require(heads % key_heads == 0, read, expected, file=path, key="num_key_value_heads")
