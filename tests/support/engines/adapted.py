"""Versions of a LoRA run for tests of engines: as an adapter, and as a whole model."""

from dataclasses import replace

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from millrace.training.lora import add_adapters, is_adapter
from millrace.training.parallel.sharding import adapter_tensors, base_tensors
from millrace.weights.adapter import Adapter

TARGETS = ["q_proj", "o_proj", "down_proj"]
RANK, MAX_STALENESS = 3, 1
ADAPTER = Adapter(rank=RANK, alpha=16.0, target_modules=tuple(TARGETS))


class AdaptedPolicy:
    """The version `version`, whose adapter is random. It changes `base`."""

    def __init__(self, base: LlamaForCausalLM, version: int, rank: int = RANK) -> None:
        self.version, self.adapter = version, replace(ADAPTER, rank=rank)
        add_adapters(base, rank=rank, alpha=ADAPTER.alpha, target_modules=TARGETS)
        random = torch.Generator().manual_seed(version)
        for name, parameter in base.named_parameters():
            if is_adapter(name):
                torch.nn.init.normal_(parameter, std=0.2, generator=random)
        self.tensors = dict(adapter_tensors(base))
        self.whole = dict(base_tensors(base, whole=True))

    def model(self, base: LlamaForCausalLM) -> PreTrainedModel:
        """`base`, which it changes, with the adapter merged in."""
        base.load_state_dict(self.whole, strict=False)
        return base
