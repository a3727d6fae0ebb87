"""A causal language model as the trainer uses it: a packed microbatch in, log π of its response tokens out.

    input_ids [S] ─► decoder ─► hidden [S, H] ─► those that predict a response token [N, H] ─► chunked log-softmax
                                                                          output layer's weight ──┘      │
                                                                              log π [N], entropy [N] ◄───┘

All that reads a weight happens within `forward` and `over_vocabulary`: whoever shards the module gathers weights there.
"""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from millrace.attention import PACKED, Packing
from millrace.batch import Microbatch
from millrace.logprobs import chunked_logprobs
from millrace.parallel.tensor import whole
from millrace.trainable import check_trainable


class TokenLogprobs(NamedTuple):
    """Of a microbatch's response tokens."""

    logprobs_N: torch.Tensor
    """[N] log π at the rollouts' temperature, nats, with gradient; float32, or float64 where the model is."""
    entropy_N: torch.Tensor
    """[N] of π where it chose the token, nats, without gradient; of the same type."""


class PackedPolicy(torch.nn.Module):
    """Owns `model`, whose attention from here on is the packed one.

    Raises InputError for a kind of model that is not known, and for one that doesn't attend to all that came before.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        check_trainable(model.config.to_dict())
        model.set_attn_implementation(PACKED)
        self.model = model

    def forward(self, batch: Microbatch) -> TokenLogprobs:
        """log π of the response tokens of `batch`, which is on the model's device."""
        weight_VH, bias_V = self._output_layer()
        logprobs_N, entropy_N = chunked_logprobs(
            self._hidden(batch), weight_VH, bias_V, batch.targets_N, batch.temperatures_N
        )
        return TokenLogprobs(logprobs_N, entropy_N)

    @torch.no_grad()
    def over_vocabulary(self, batch: Microbatch) -> torch.Tensor:
        """[N, V] log π of every token that could stand in a response token's place, nats; as wide as `forward` is."""
        logits_NV = torch.nn.functional.linear(self._hidden(batch), *self._output_layer())
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        return torch.log_softmax(logits_NV.to(wide) / batch.temperatures_N[:, None], dim=-1)

    def _hidden(self, batch: Microbatch) -> torch.Tensor:
        """[N, H] what the decoder makes of the positions that predict a response token."""
        out = self.model.base_model(
            input_ids=batch.input_ids_S[None],
            position_ids=batch.positions_S[None],
            use_cache=False,
            packing=Packing.of(batch),
        )
        hidden_NH: torch.Tensor = out.last_hidden_state[0].index_select(0, batch.predicts_N)
        return hidden_NH

    def _output_layer(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        head = self.model.lm_head
        assert isinstance(head, torch.nn.Linear)
        return whole(head.weight), None if head.bias is None else whole(head.bias)
