"""A frozen prefix: embeddings and the first layers keep the start model's weights.

    tokens ─► embeddings ─► layers 0 … n − 1 ─┃─► layers n … ─► norm, output layer ─► log π
              frozen: no gradient, no moments ┃   trained; the backward pass ends here, and so do stored activations

Where the output layer's weight is the embeddings', it is frozen with them.
"""

from torch import nn
from transformers import PreTrainedModel


def freeze_prefix(model: PreTrainedModel, num_layers: int) -> None:
    """Freezes the embeddings and the first `num_layers` decoder layers of `model`, at least one, in place."""
    layers = model.base_model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    for module in (model.get_input_embeddings(), *layers[:num_layers]):
        module.requires_grad_(False)
