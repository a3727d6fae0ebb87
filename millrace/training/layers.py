"""How the trainer computes decoder layers: compiled or not, and which activations stay for the backward pass.

    activation_checkpointing    not compiled                       compiled, all but attention and experts
    false                       all                                what torch's partitioner chooses: about 3/4
    selective                   results of products, attention     the same, and what the graphs exchange
    true                        the layer's input                  the layer's input

A layer is compiled without the hooks of its module, so FSDP2 gathers its weights outside of the compiled graphs.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AttentionInterface, PreTrainedModel

from millrace.models.modules import decoder_layers, routers
from millrace.training.attention import PACKED, packed_attention

_ATEN = torch.ops.aten
_KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN._grouped_mm.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
    }
)
"""Operations whose results are kept: each takes longer than all the rest of a layer does between two of them."""


def prepare_layers(model: PreTrainedModel, *, checkpointing: Literal[False, True, "selective"], compiled: bool) -> None:
    """Has the decoder layers of `model` computed so from the next forward pass on. Call it before `shard`."""
    if compiled:
        _compile(model, keeps_little=checkpointing == "selective")
    if checkpointing is True or (checkpointing and not compiled):
        options: dict[str, Any] = {"use_reentrant": False}
        if checkpointing == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _compile(model: PreTrainedModel, *, keeps_little: bool) -> None:
    # Imported late: it takes a second, and trainers on CPUs don't need it.
    import torch._functorch.config as partitioner

    # Then it recomputes all but products.
    partitioner.aggressive_recomputation = keeps_little
    # It reads the lengths of segments: the compiler would make new graphs for each microbatch.
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))  # type: ignore[no-untyped-call]
    chosen = set(routers(model))
    for block in list(model.modules()):
        if chosen & set(block.children()):
            # How many tokens an expert gets is data, and hooks of routers record and replace choices.
            block.forward = torch.compiler.disable(block.forward)  # type: ignore[no-untyped-call]
    for layer in decoder_layers(model).values():
        layer.forward = torch.compile(layer.forward, dynamic=True)
