"""Low-rank adapters: small matrices that are trained in place of the frozen weights they stand beside.

    hidden ─┬─► W [out, in], frozen ──────────────────────────────┐
            └─► A [rank, in] ─► B [out, rank] ─► · alpha / rank ──┴─► + ─► out

B starts at 0, so that the policy starts as the base model (arXiv 2106.09685). Generators never see adapters: what they
get is W + (alpha / rank) · B · A under the base model's names.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from millrace.errors import InputError

# peft takes a second to import, and few runs need it.
if TYPE_CHECKING:
    from peft.tuners.lora import Linear as LoraLinear

_ADAPTER = "default"
"""peft's name for the only one there is."""


def add_adapters(model: PreTrainedModel, *, rank: int, alpha: float, target_modules: Sequence[str]) -> None:
    """Puts adapters beside all linear layers of these names, in place; from here on only they have a gradient.

    They are of their layer's type; A is drawn from torch's random numbers, which have to be the same on every rank.
    Raises InputError where a name is no linear layer's.
    """
    named = model.base_model.named_modules()
    linear = {name.rpartition(".")[2] for name, module in named if isinstance(module, nn.Linear)}
    if unknown := sorted(set(target_modules) - linear):
        raise InputError(
            f"training.lora.target_modules has {', '.join(unknown)}, and the model has no linear layers of that name; "
            f"expected some of {', '.join(sorted(linear))}"
        )
    import peft

    # Its annotation says int; what it does is divide by the rank.
    lora_alpha = cast(int, alpha)
    config = peft.LoraConfig(r=rank, lora_alpha=lora_alpha, target_modules=list(target_modules), lora_dropout=0.0)
    peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER)


def adapters(model: nn.Module) -> dict[str, "LoraLinear"]:
    """The adapted layers, by the name of their frozen weight."""
    if "peft" not in sys.modules:
        # Nobody has put any there.
        return {}
    from peft.tuners.lora import Linear as LoraLinear

    modules = model.named_modules()
    return {f"{name}.base_layer.weight": module for name, module in modules if isinstance(module, LoraLinear)}


def parts(layer: "LoraLinear") -> tuple[torch.Tensor, torch.Tensor, float]:
    """A [rank, in], B [out, rank] and alpha / rank of an adapted layer: the live parameters."""
    down, up = cast(nn.Linear, layer.lora_A[_ADAPTER]), cast(nn.Linear, layer.lora_B[_ADAPTER])
    return down.weight, up.weight, float(layer.scaling[_ADAPTER])


def merged(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scaling: float) -> torch.Tensor:
    """W + (alpha / rank) · B · A, in W's type; added up in float32 at least."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + up.to(wide) @ down.to(wide) * scaling).to(weight.dtype)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's, not the base model's."""
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """What the base model calls a parameter that may stand beside an adapter."""
    return name.replace(".base_layer.", ".")
