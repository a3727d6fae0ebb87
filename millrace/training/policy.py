"""A causal language model as the trainer uses it: a packed microbatch in, log π of its response tokens out.

    input_ids [S] ─► decoder ─► hidden [S, H] ─► those that predict a response token [N, H] ─► chunked log-softmax
                                                                          output layer's weight ──┘      │
                                                                              log π [N], entropy [N] ◄───┘

All reads of weights happen within `forward` and `over_vocabulary`, because FSDP gathers the weights there.
"""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from millrace.models.modules import call_at_each_layer
from millrace.models.supported import check_trainable
from millrace.training.attention import PACKED
from millrace.training.batch import Microbatch
from millrace.training.logprobs import LogitScale, chunked_logprobs, chunked_top, output_logits
from millrace.training.losses.forward_kl import TopTokens
from millrace.training.parallel.ranks import local
from millrace.training.routing import Routing


class PackedPolicy(torch.nn.Module):
    """Owns `model`, and replaces its attention by the packed one.

    `router_replay` and `balances_experts` are parameters of `Routing`, `compiled` one of `chunked_logprobs`. Raises
    InputError for a model of an unsupported family.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compiled: bool = False,
        router_replay: bool = False,
        balances_experts: bool = False,
    ) -> None:
        super().__init__()
        check_trainable(model.config.to_dict())
        model.set_attn_implementation(PACKED)
        self.model = model
        self._compiled = compiled
        self.on_progress: Callable[[], None] = lambda: None
        """Called at each layer of a forward and a backward pass, and at each chunk of the output layer."""
        call_at_each_layer(model, lambda: self.on_progress())
        self.routing = Routing(model, replays=router_replay, balances=balances_experts)
        config = model.config
        # Granite divides its logits; Gemma 2 caps them.
        self._scale = LogitScale(
            divisor=getattr(config, "logits_scaling", 1.0), cap=getattr(config, "final_logit_softcapping", None)
        )

    def forward(self, batch: Microbatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """[N] log π of the response tokens of `batch` at the rollouts' temperature, [N] entropy of π there, and [N]
        KL(π_T‖π) there, nats; None without a teacher's likeliest tokens (`chunked_logprobs`).

        All have a gradient, and are float32, or float64 if the model is. Where sampling was truncated, π is
        renormalised over the tokens that it kept, as μ is. `batch` is on the model's device.
        """
        weight_VH, bias_V = self._output_layer()
        return chunked_logprobs(
            self._hidden(batch),
            weight_VH,
            bias_V,
            batch.targets_N,
            batch.temperatures_N,
            scale=self._scale,
            kept=batch.kept,
            teacher_top=batch.teacher_top,
            compiled=self._compiled,
            each_chunk=self.on_progress,
        )

    @torch.no_grad()
    def top(self, batch: Microbatch, num_top: int) -> tuple[torch.Tensor, TopTokens]:
        """[N] log π of the response tokens, and the `num_top` likeliest tokens there, of a policy on one rank."""
        return chunked_top(
            self._hidden(batch),
            *self._output_layer(),
            batch.targets_N,
            batch.temperatures_N,
            num_top,
            scale=self._scale,
            kept=batch.kept,
            each_chunk=self.on_progress,
        )

    @torch.no_grad()
    def over_vocabulary(self, batch: Microbatch) -> torch.Tensor:
        """[N, V] log π of every token of the vocabulary at each response token, nats; dtype as in `forward`.

        Of the whole distribution at the temperature, also where sampling was truncated.
        """
        logits_NV = self._scale.logits(output_logits(self._hidden(batch), *self._output_layer()))
        return torch.log_softmax(logits_NV / batch.temperatures_N[:, None], dim=-1)

    def _hidden(self, batch: Microbatch) -> torch.Tensor:
        """[N, H] the decoder's output at the positions that predict a response token."""
        self.routing.begin(batch)
        out = self.model.base_model(
            input_ids=batch.input_ids_S[None], position_ids=batch.positions_S[None], use_cache=False, packing=batch
        )
        hidden_NH: torch.Tensor = out.last_hidden_state[0].index_select(0, batch.predicts_N)
        return hidden_NH

    def _output_layer(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        head = self.model.lm_head
        assert isinstance(head, torch.nn.Linear)
        return local(head.weight), None if head.bias is None else local(head.bias)
