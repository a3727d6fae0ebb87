"""The routers of a mixture of experts: which experts compute which token.

A router's forward pass gives (logits [T, experts], weights [T, k], ids of the chosen experts [T, k]) of T tokens.
"""

from torch import nn

NOT_RECORDED = 2**16 - 1
"""Stands for an expert where none was recorded."""


def routers(model: nn.Module) -> list[nn.Module]:
    """The routers of `model` in the order of its layers; none if it is no mixture of experts."""
    # All families' routers in transformers are called so: MixtralTopKRouter, GptOssTopKRouter, …
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
