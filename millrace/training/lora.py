"""Low-rank adapters: small matrices that are trained instead of the frozen weights they belong to.

    hidden ─┬─► W [out, in], frozen ──────────────────────────────┐
            └─► A [rank, in] ─► B [out, rank] ─► · alpha / rank ──┴─► + ─► out

B starts at 0, so that the policy starts as the base model (arXiv 2106.09685). Generators get A and B
(`millrace/weights/adapter.py`); with the transport `direct` they get W + (alpha / rank) · B · A.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from configs.training import TrainingConfig
from millrace.errors import InputError
from millrace.weights.adapter import Adapter

_ADAPTER = "default"
"""peft's name for the only adapter."""


def add_adapters(
    model: PreTrainedModel, *, rank: int, alpha: float, target_modules: Sequence[str], frozen_layers: int = 0
) -> None:
    """Adds adapters to all linear layers of these names, in place; from then on only adapters have a gradient.

    The first `frozen_layers` decoder layers get none. A is drawn from torch's random numbers, which have to be the same
    on every rank. Raises InputError for a name that no linear layer has.
    """
    named = model.base_model.named_modules()
    linear = {name.rpartition(".")[2] for name, module in named if isinstance(module, nn.Linear)}
    if unknown := sorted(set(target_modules) - linear):
        raise InputError(
            f"{', '.join(unknown)}, but the model has no linear layers of that name",
            key="training.lora.target_modules",
            expected=f"some of {', '.join(sorted(linear))}",
        )
    # It takes a second to import, and few runs need it.
    import peft

    # Annotated as int, but peft only divides it by the rank.
    lora_alpha = cast(int, alpha)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=lora_alpha,
        target_modules=list(target_modules),
        lora_dropout=0.0,
        layers_to_transform=list(range(frozen_layers, model.config.num_hidden_layers)) if frozen_layers else None,
        layers_pattern="layers" if frozen_layers else None,
    )
    peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER)


def described(training: TrainingConfig) -> Adapter:
    """Describes the adapters of a run with `training.lora.rank`, for generators and PEFT's files."""
    lora, frozen_layers = training.lora, training.frozen_layers
    if lora.rank is None:
        raise ValueError("the run has no adapters")
    targets = tuple(lora.target_modules)
    return Adapter(rank=lora.rank, alpha=lora.alpha, target_modules=targets, frozen_layers=frozen_layers)


def adapters(model: nn.Module) -> dict[str, nn.Module]:
    """peft's layers with adapters, by the name of their frozen weight."""
    modules = model.named_modules()
    return {f"{name}.base_layer.weight": module for name, module in modules if hasattr(module, "lora_A")}


def parts(layer: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A [rank, in], B [out, rank] and alpha / rank of a layer with adapters; A and B are the live parameters."""
    return layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight, float(layer.scaling[_ADAPTER])


def drawn(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of a layer as `add_adapters` makes them, on the CPU: the same draws, in the order of `adapters`."""
    # peft makes both as linear layers, whose own values it then replaces.
    rank, dtype = layer.r[_ADAPTER], layer.get_base_layer().weight.dtype
    down, up = nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, bias=False)
    nn.init.kaiming_uniform_(down.weight, a=math.sqrt(5))
    return down.weight.detach().to(dtype), torch.zeros_like(up.weight, dtype=dtype)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """A parameter's name in the base model; peft renames the weights of layers with adapters."""
    return name.replace(".base_layer.", ".")
