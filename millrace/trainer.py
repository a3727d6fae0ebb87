"""One policy being trained: batches of samples in, new policy versions and the numbers behind them out.

    samples ─► microbatches ─► log π ─► loss ─► gradients summed ─► clipped ─► AdamW ─► version + 1

Knows nothing of streams, checkpoints' places or other processes: `stages/train.py` feeds it.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from transformers import PreTrainedModel

from millrace.batch import Microbatch, Sample, microbatches
from millrace.errors import TrainingDiverged
from millrace.losses.base import Loss
from millrace.losses.factory import make_loss
from storage.checkpoints import Checkpoint, load_file
from storage.failpoints import failpoint
from storage.store import Store

if TYPE_CHECKING:
    from configs.training import TrainingConfig

WEIGHTS_FILE = "model.safetensors"
"""Name of the policy's parameters among a checkpoint's files."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one optimizer step did. Means are over the tokens that carry loss."""

    loss: float
    """Mean surrogate loss."""
    grad_norm: float
    """Global L2 norm before clipping."""
    importance_ratio_mean: float
    """Mean π/μ before clipping."""
    importance_ratio_p05: float
    """Quantiles of π/μ before clipping: a twentieth of the tokens is below this one, half below the next, …"""
    importance_ratio_p50: float
    importance_ratio_p95: float
    importance_ratio_max: float
    clip_fraction: float
    """Share of tokens whose weight the loss bounded."""
    effective_sample_size: float
    """(Σ w)² / (n · Σ w²) of the weights w that the loss gave, in [0, 1]; 0 where all are 0."""
    weight_mean: float
    """Mean of the weights that the loss gave: 1 on rollouts of the policy itself."""
    weight_max: float
    mismatch_kl: float
    """Mean of log μ − log π over sampled tokens: an estimate of KL(μ‖π), nats."""
    entropy: float
    """Of the trained policy's next token at the rollout's temperature, nats."""
    tokens: int
    """Response tokens that carried loss."""
    trainer_logprobs: list[npt.NDArray[np.float32]] = field(compare=False)
    """[samples] of [R] log π of each response token before the step, nats."""

    def measured(self) -> dict[str, float]:
        """What a plot can show: every number above, by name."""
        names = (one.name for one in fields(self) if one.name != "trainer_logprobs")
        return {name: getattr(self, name) for name in names}


class Trainer:
    """A policy, its optimizer and its version."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        loss: Loss,
        learning_rate: float,
        weight_decay: float,
        max_grad_norm: float,
        max_tokens_per_microbatch: int,
    ) -> None:
        self.model = model.train()
        self.policy_version = 0
        self.loss = loss
        self._max_grad_norm = max_grad_norm
        self._max_tokens_per_microbatch = max_tokens_per_microbatch
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay)

    @classmethod
    def configured(cls, model: PreTrainedModel, training: "TrainingConfig") -> Self:
        """As a config's section says."""
        return cls(
            model,
            loss=make_loss(training),
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            max_grad_norm=training.max_grad_norm,
            max_tokens_per_microbatch=training.max_tokens_per_microbatch,
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """The live parameters by name; tied ones appear once. They change with the next step."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @property
    def vocab_size(self) -> int:
        """How many token ids the policy knows."""
        size: int = self.model.config.vocab_size
        return size

    @torch.no_grad()
    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        """log π of the `most` likeliest tokens to follow `tokens`, nats, at temperature 1, under the live weights."""
        logits_V = self.model(input_ids=torch.tensor([list(tokens)], device=self.model.device)).logits[0, -1]
        best = torch.log_softmax(logits_V.float(), dim=-1).topk(min(most, self.vocab_size))
        return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def step(self, samples: Sequence[Sample]) -> StepReport:
        """One optimizer step on the token mean of the loss over all `samples`; the policy version grows by one.

        Raises TrainingDiverged where the gradient is not finite; weights, optimizer and version stay as they are.
        """
        batches = self.microbatches(samples)
        num_tokens = int(sum(batch.loss_mask_BT.sum() for batch in batches))
        self._optimizer.zero_grad(set_to_none=True)
        parts = [self._backward(batch, num_tokens) for batch in batches]
        failpoint("train.mid_step")
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        if not grad_norm.isfinite():
            raise TrainingDiverged(
                f"the gradient of {self.loss.name} on the way to version {self.policy_version + 1} has norm "
                f"{grad_norm.item()}; expected a finite one, as fresher rollouts or a smaller learning rate keep it"
            )
        self._optimizer.step()
        self.policy_version += 1
        return _report(parts, grad_norm.item(), _in_order(batches, parts))

    def microbatches(self, samples: Sequence[Sample]) -> list[Microbatch]:
        """How a step on `samples` goes through them."""
        return microbatches(samples, self._max_tokens_per_microbatch)

    def logprobs_of(self, batch: Microbatch) -> torch.Tensor:
        """[B, T, V] log π of every token that could stand at position t + 1, at the rollouts' temperature, nats."""
        device = self.model.device
        logits_BTV = self.model(
            input_ids=batch.input_ids_BS.to(device), attention_mask=batch.attention_mask_BS.to(device)
        ).logits
        return torch.log_softmax(logits_BTV[:, :-1].float() / batch.temperatures_B11.to(device), dim=-1)

    def _backward(self, batch: Microbatch, num_tokens: int) -> "_Tokens":
        """Adds the gradient of this microbatch's share of the token mean."""
        device = self.model.device
        logprobs_BTV = self.logprobs_of(batch)
        input_ids_BS = batch.input_ids_BS.to(device)
        trainer_logprobs_BT = logprobs_BTV.gather(2, input_ids_BS[:, 1:, None]).squeeze(2)
        loss_mask_BT = batch.loss_mask_BT.to(device)
        rollout_logprobs_BT = batch.rollout_logprobs_BT.to(device)
        judged = self.loss(trainer_logprobs_BT, rollout_logprobs_BT, batch.advantages_BT.to(device))
        loss = (judged.loss * loss_mask_BT).sum() / num_tokens
        loss.backward()
        carries_loss = loss_mask_BT.bool()
        return _Tokens(
            loss=loss.item(),
            importance_ratio=judged.importance_ratio[carries_loss],
            weight=judged.weight[carries_loss],
            clipped=judged.clipped[carries_loss],
            log_mismatch=(rollout_logprobs_BT - trainer_logprobs_BT.detach())[carries_loss],
            entropy=torch.special.entr(logprobs_BTV.detach()[carries_loss].exp()).sum(dim=-1),
            trainer_logprobs_BT=trainer_logprobs_BT.detach().cpu().numpy(),
        )

    def state(self) -> dict[str, bytes]:
        """Everything a resumed trainer needs, as safetensors files by name: bit for bit what it was."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        optimizer = {
            f"{key}.{names[parameter]}": value.contiguous()
            for parameter, slots in self._optimizer.state.items()
            for key, value in slots.items()
        }
        weights = {name: tensor.contiguous() for name, tensor in self.weights().items()}
        return {
            WEIGHTS_FILE: safetensors.torch.save(weights, metadata={"format": "pt"}),
            "optimizer.safetensors": safetensors.torch.save(optimizer),
            "rng.safetensors": safetensors.torch.save({"cpu": torch.get_rng_state()}),
        }

    def copy_with(self, loss: Loss) -> Self:
        """A trainer with a policy and an optimizer of its own: as this one is now, but for the loss."""
        copy = type(self)(
            deepcopy(self.model),
            loss=loss,
            learning_rate=self._optimizer.defaults["lr"],
            weight_decay=self._optimizer.defaults["weight_decay"],
            max_grad_norm=self._max_grad_norm,
            max_tokens_per_microbatch=self._max_tokens_per_microbatch,
        )
        copy.become(self)
        return copy

    @torch.no_grad()
    def become(self, other: "Trainer") -> None:
        """Takes over weights, optimizer state and version of another trainer of the same model; its loss stays."""
        theirs = dict(other.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            parameter.copy_(theirs[name])
            slots = other._optimizer.state.get(theirs[name], {})
            self._optimizer.state[parameter] = {key: value.clone() for key, value in slots.items()}
        self.policy_version = other.policy_version

    def restore(self, policy_version: int, files: dict[str, bytes]) -> None:
        """The inverse of `state`. Raises KeyError where a tensor of the model is not in the files."""
        weights = safetensors.torch.load(files[WEIGHTS_FILE])
        optimizer = safetensors.torch.load(files["optimizer.safetensors"])
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
                slots = {key: f"{key}.{name}" for key in ("step", "exp_avg", "exp_avg_sq")}
                # A checkpoint of version 0 was taken before the optimizer had any state.
                if slots["step"] in optimizer:
                    self._optimizer.state[parameter] = {key: optimizer[slot] for key, slot in slots.items()}
        torch.set_rng_state(safetensors.torch.load(files["rng.safetensors"])["cpu"])
        self.policy_version = policy_version


def load_weights(store: Store, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The policy's parameters by name, out of a trainer's checkpoint. Raises StreamCorrupt."""
    weights: dict[str, torch.Tensor] = safetensors.torch.load(load_file(store, checkpoint.files[WEIGHTS_FILE]))
    return weights


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """Of one microbatch: its share of the loss, and [N] values of the tokens that carry loss."""

    loss: float
    importance_ratio: torch.Tensor
    weight: torch.Tensor
    clipped: torch.Tensor
    log_mismatch: torch.Tensor
    entropy: torch.Tensor
    trainer_logprobs_BT: npt.NDArray[np.float32]
    """[B, T] of all tokens."""


def _in_order(batches: Sequence[Microbatch], parts: Sequence[_Tokens]) -> list[npt.NDArray[np.float32]]:
    """The response tokens' log π, sample by sample as they were given."""
    found = {
        place: part.trainer_logprobs_BT[row, start:end]
        for batch, part in zip(batches, parts, strict=True)
        for row, (place, (start, end)) in enumerate(zip(batch.places, batch.response_spans, strict=True))
    }
    return [found[place] for place in range(len(found))]


def _report(
    parts: Sequence[_Tokens],
    grad_norm: float,
    trainer_logprobs: list[npt.NDArray[np.float32]],
) -> StepReport:
    importance_ratio = torch.cat([part.importance_ratio for part in parts])
    p05, p50, p95 = np.quantile(importance_ratio.cpu().numpy(), (0.05, 0.5, 0.95)).tolist()
    weight = torch.cat([part.weight for part in parts]).double()
    squares = (weight**2).sum()
    return StepReport(
        loss=sum(part.loss for part in parts),
        grad_norm=grad_norm,
        importance_ratio_mean=importance_ratio.mean().item(),
        importance_ratio_p05=p05,
        importance_ratio_p50=p50,
        importance_ratio_p95=p95,
        importance_ratio_max=importance_ratio.max().item(),
        clip_fraction=torch.cat([part.clipped for part in parts]).float().mean().item(),
        effective_sample_size=(weight.sum() ** 2 / (weight.numel() * squares)).item() if squares else 0.0,
        weight_mean=weight.mean().item(),
        weight_max=weight.max().item(),
        mismatch_kl=torch.cat([part.log_mismatch for part in parts]).mean().item(),
        entropy=torch.cat([part.entropy for part in parts]).mean().item(),
        tokens=importance_ratio.numel(),
        trainer_logprobs=trainer_logprobs,
    )
