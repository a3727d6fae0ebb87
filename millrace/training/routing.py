"""Mixtures of experts in the trainer: routed as the generator routed, and kept in balance, each if the config asks.

    router ─► logits ─┬─► chosen experts: the generator's where they were recorded, else the router's own
                      └─► their weights: a softmax of these logits, with gradient

Generator and trainer round differently and decide near ties differently: then other experts compute π and μ. Replaying
the generator's choice takes that difference away (R3, arXiv 2510.11370). The router learns as always.

Shapes: S positions of a microbatch, L layers with experts, E experts of a layer, K of them per token, P samples.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from millrace.models.modules import NOT_RECORDED, routers
from millrace.training.batch import Microbatch


class Routing:
    """Takes part in every forward pass of `model`. Call `begin` before each.

    `replays`: whether recorded experts are used. `balances`: whether `imbalance` will be called.
    """

    def __init__(self, model: nn.Module, *, replays: bool, balances: bool) -> None:
        self._replays, self._balances = replays, balances
        self._recorded_SLK: torch.Tensor | None = None
        self._routed_by: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._num_layers = 0
        for layer, router in enumerate(routers(model)):
            router.register_forward_hook(partial(self._route, layer))
            self._num_layers += 1

    def begin(self, batch: Microbatch) -> None:
        """The next forward pass, and what its backward pass computes again, are of `batch`."""
        self._routed_by.clear()
        recorded_SX, self._recorded_SLK = batch.routed_experts_SX, None
        if self._replays and recorded_SX is not None:
            self._recorded_SLK = recorded_SX.view(len(recorded_SX), self._num_layers, -1)

    def imbalance(self, batch: Microbatch) -> torch.Tensor:
        """Sum over the samples of `batch` of E · Σ over experts of share of picks · mean probability; mean of layers.

        1 for a sample whose tokens use all experts alike, and more the less they do (Switch, arXiv 2101.03961; by
        sequence as in DeepSeek-V3, so that it does not depend on how a batch is split). With gradient.
        """
        device = batch.cu_seqlens_Q1.device
        lengths_P = torch.tensor(batch.sample_lengths, device=device)
        total = torch.zeros((), device=device)
        for logits_SE, chosen_SK in self._routed_by.values():
            probs_SE = logits_SE.float().softmax(dim=-1)
            picks_SE = torch.zeros_like(probs_SE).scatter(1, chosen_SK, 1 / chosen_SK.shape[1])
            # Each times the length.
            products_PE = _per_sample(probs_SE, batch) * _per_sample(picks_SE, batch)
            imbalance_P = products_PE.sum(dim=1) * probs_SE.shape[1] / lengths_P.square()
            # Of a spare rank's dummy token it is an empty sum, which has a gradient of 0.
            total = total + imbalance_P.sum() / self._num_layers
        return total

    def _route(self, layer: int, router: nn.Module, inputs: Any, output: tuple[torch.Tensor, ...]) -> Any:
        logits_SE, weights_SK, chosen_SK = output
        if self._recorded_SLK is not None:
            recorded_SK = self._recorded_SLK[:, layer]
            is_recorded_SK = recorded_SK != NOT_RECORDED
            chosen_SK = torch.where(is_recorded_SK, recorded_SK, chosen_SK)
            # The router's own weights stay as they are: computed again, they could round differently.
            recomputed_SK = _weights(router, logits_SE, chosen_SK).to(weights_SK.dtype)
            weights_SK = torch.where(is_recorded_SK, recomputed_SK, weights_SK)
        if self._balances:
            self._routed_by[layer] = logits_SE, chosen_SK
        return logits_SE, weights_SK, chosen_SK


def _per_sample(of_SE: torch.Tensor, batch: Microbatch) -> torch.Tensor:
    """[P, E] sums over the tokens of each sample, float32."""
    lengths_P = torch.tensor(batch.sample_lengths, dtype=torch.int64, device=of_SE.device)
    samples_P = torch.arange(len(lengths_P), device=of_SE.device)
    sample_W = samples_P.repeat_interleave(lengths_P, output_size=len(batch.where_W))
    return torch.zeros(len(lengths_P), of_SE.shape[1], device=of_SE.device).index_add(0, sample_W, of_SE[batch.where_W])


def _weights(router: nn.Module, logits_SE: torch.Tensor, chosen_SK: torch.Tensor) -> torch.Tensor:
    """[S, K] as the family's router computes them of the experts that it chose itself."""
    wide = torch.promote_types(logits_SE.dtype, torch.float32)
    # Qwen and OLMoE have a switch for this; in all others the weights of a token add up to 1.
    if getattr(router, "norm_topk_prob", True):
        return logits_SE.gather(1, chosen_SK).softmax(dim=-1, dtype=wide)
    return logits_SE.softmax(dim=-1, dtype=wide).gather(1, chosen_SK)
