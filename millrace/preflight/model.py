"""Checks whether a campaign can train a model, before anything runs and without loading it."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.recipe import Recipe
from configs.schema import ModelConfig
from configs.training import ParallelConfig, TrainingConfig
from millrace.errors import InputError, ModelFolderError
from millrace.models.supported import FAMILIES, check_trainable
from millrace.preflight.model_folder import read_object
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
    folder = Path(model.path).expanduser()

    def require(fine: bool, read: str, expected: str) -> None:
        if not fine:
            raise ModelFolderError(key="model.path", read=f"'{folder}', which {read}", expected=expected)

    require(folder.is_dir(), "is not a folder", "a Hugging Face model folder, or ORG/NAME of a hub")
    require((folder / "config.json").is_file(), "has no config.json", "a model folder")
    config = read_object(folder / "config.json")
    _check_config(folder / "config.json", config)
    has_weights = any(match for pattern in _WEIGHT_FILES for match in folder.glob(pattern))
    require(has_weights, "has no weights", "*.safetensors files")
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    require(has_tokenizer, "has no tokenizer", f"one of {', '.join(_TOKENIZER_FILES)}")
    return config


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
                    key=f"training.{key}",
                    read=f"{json.dumps(value)} and a {model['model_type']} model has no experts",
                    expected=f"{'false' if value is True else 0} (docs/models.md)",
                )
    frozen, layers, rank = training.frozen_layers, model.get("num_hidden_layers"), training.lora.rank
    if frozen and layers is None:
        read = f"{frozen} and the model's config.json has no num_hidden_layers"
        raise InputError(read, key=_LAYERS, expected="it there")
    if frozen and layers is not None and frozen > layers:
        raise InputError(f"{frozen} and the model has {layers} layers", key=_LAYERS, expected=f"at most {layers}")
    if rank is not None:
        if frozen == layers:
            read = f"{frozen}, the model has {layers} layers and training.lora.rank is {rank}"
            raise InputError(read, key=_LAYERS, expected="fewer frozen layers, because adapters are in the others")
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
        if not isinstance(size, int):
            read = f"{tensor} and the model's config.json has no {name}"
            raise InputError(read, key=_TENSOR, expected="a model of Llama's kind, or a tensor of 1")
        if size % tensor:
            read = f"{tensor} and the model's {name} is {size}"
            raise InputError(read, key=_TENSOR, expected="tensor to divide it")


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelFolderError for a value of another type than the checks, and transformers, take it for."""

    def require(fine: bool, key: str, read: object, expected: str) -> None:
        if not fine:
            raise ModelFolderError(file=path, key=key, read=read, expected=expected)

    kind = config.get("model_type")
    require(isinstance(kind, str), "model_type", repr(kind), "that of a Hugging Face model")
    for name in _SIZES:
        size = config.get(name)
        require(size is None or (type(size) is int and size > 0), name, repr(size), "a whole number above 0")
    for name in _SECTIONS:
        require(isinstance(config.get(name) or {}, dict), name, repr(config.get(name)), "an object")
    for name, value in _numbers(config):
        require(isinstance(value, int) or math.isfinite(value), name, value, "a finite number")
        require(name.rpartition(".")[2] not in _ABOVE_ZERO or value > 0, name, value, "a number above 0")
    heads, key_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads is not None and key_heads is not None:
        read = f"{key_heads} and num_attention_heads is {heads}"
        require(heads % key_heads == 0, "num_key_value_heads", read, "a divisor of num_attention_heads")


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (dotted key, number) for each number in `values`, however deep."""
    pending: list[tuple[str, Any]] = list(values.items())
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending.extend((f"{name}.{key}", child) for key, child in value.items())
        elif isinstance(value, list):
            pending.extend((name, child) for child in value)
        elif type(value) in (int, float):
            yield name, value
