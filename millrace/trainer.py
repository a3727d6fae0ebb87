"""One policy being trained: batches of samples in, new policy versions and the numbers behind them out.

    samples ─► microbatches ─► own share ─► log π ─► objective ─► gradients summed ─► clipped ─► AdamW ─► version + 1
               the same on every rank                            └─ over ranks after each microbatch: no rank
                                                                    ever holds a whole gradient

Every rank is given the same samples: so each knows the lengths of the whole batch, and no count has to be sent. Knows
nothing of streams, checkpoints' places or how ranks are started: `stages/train.py` feeds it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from millrace.batch import Microbatch, Sample, microbatches, pack
from millrace.checkpointing.image import lone_files
from millrace.checkpointing.policy_state import policy_state, restore_policy_state
from millrace.errors import TrainingDiverged
from millrace.losses.base import Loss
from millrace.losses.factory import make_loss
from millrace.objective import Objective
from millrace.offload import move
from millrace.parallel.lora import adapters, add_adapters, parts
from millrace.parallel.ranks import ALONE, Ranks
from millrace.parallel.sharding import full_tensors, shard
from millrace.policy import PackedPolicy
from millrace.step_report import StepReport, TokenTable
from storage.failpoints import failpoint

if TYPE_CHECKING:
    from configs.schema import RunConfig


class Trainer:
    """A policy, its optimizer and its version. Of several ranks each has one, and all call the same methods.

    `reference` is the start model of a run whose objective has a KL; it is never changed, and lies in the CPU's memory
    between steps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        objective: Objective,
        learning_rate: float,
        weight_decay: float,
        max_grad_norm: float,
        max_tokens_per_microbatch: int,
        activation_checkpointing: bool = False,
        compute_dtype: torch.dtype | None = None,
        reference: PreTrainedModel | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        if (reference is None) != (objective.kl_coefficient == 0):
            raise ValueError("a reference policy is wanted where the objective's KL has a coefficient, and only there")
        self.policy = PackedPolicy(model.train())
        shard(self.policy, ranks, compute_dtype=compute_dtype)
        self.policy_version = 0
        self.objective = objective
        self.ranks = ranks
        self._max_grad_norm = max_grad_norm
        self._max_tokens_per_microbatch = max_tokens_per_microbatch
        if activation_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._compute_dtype = compute_dtype
        self._reference = None if reference is None else self._frozen(reference)
        self._optimizer = torch.optim.AdamW(self._parameters().values(), lr=learning_rate, weight_decay=weight_decay)

    @classmethod
    def configured(
        cls,
        model: PreTrainedModel,
        config: "RunConfig",
        *,
        reference: PreTrainedModel | None = None,
        ranks: Ranks = ALONE,
    ) -> Self:
        """As a run's config says. `reference` is wanted where `training.kl.coefficient` is above 0."""
        training = config.training
        if (rank := training.lora.rank) is not None:
            add_adapters(model, rank=rank, alpha=training.lora.alpha, target_modules=training.lora.target_modules)
        objective = Objective(
            loss=make_loss(training),
            max_new_tokens=config.generation.max_new_tokens,
            aggregation=training.aggregation,
            kl_coefficient=training.kl.coefficient,
            kl_estimator=training.kl.estimator,
        )
        return cls(
            model,
            objective=objective,
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            max_grad_norm=training.max_grad_norm,
            max_tokens_per_microbatch=training.max_tokens_per_microbatch,
            activation_checkpointing=training.activation_checkpointing,
            compute_dtype=None if training.compute_dtype is None else getattr(torch, training.compute_dtype),
            reference=reference,
            ranks=ranks,
        )

    @property
    def model(self) -> PreTrainedModel:
        """The policy as transformers has it; what it computes goes through `policy`."""
        return self.policy.model

    @property
    def loss(self) -> Loss:
        """What it trains with."""
        return self.objective.loss

    def weights(self) -> dict[str, torch.Tensor]:
        """The base model's parameters by name, whole, adapters merged in; tied ones appear once.

        Where neither ranks nor adapters are they are the live ones, which change with the next step.
        """
        return dict(full_tensors(self.model))

    @property
    def vocab_size(self) -> int:
        """How many token ids the policy knows."""
        size: int = self.model.config.vocab_size
        return size

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        """log π of the `most` likeliest tokens to follow `tokens`, nats, at temperature 1, under the live weights."""
        follows = Sample(
            prompt_tokens=np.array(tokens, dtype=np.int32),
            # Stands for whatever comes next: no position before it sees it.
            response_tokens=np.zeros(1, dtype=np.int32),
            rollout_logprobs=np.zeros(1, dtype=np.float32),
            loss_mask=np.zeros(1, dtype=np.uint8),
            temperature=1.0,
            advantage=0.0,
            staleness=0,
        )
        logprobs_V = self.logprobs_of(pack(follows))[0]
        best = logprobs_V.topk(min(most, self.vocab_size))
        return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def step(self, samples: Sequence[Sample]) -> StepReport:
        """One optimizer step on all `samples`, which every rank has to be given; the policy version grows by one.

        Raises InputError where no token of `samples` carries loss, and TrainingDiverged where log-probabilities or the
        gradient are not finite; weights, optimizer and version stay as they are.
        """
        scale_Q = self.objective.scale(samples)
        batches = [batch.to(self.ranks.device) for batch in self.microbatches(samples)]
        batches = batches[self.ranks.data_rank :: self.ranks.data_size]
        references = self._reference_logprobs(batches)
        table = TokenTable(samples, self.ranks.device)
        self._optimizer.zero_grad(set_to_none=True)
        for batch, ref_logprobs_N in zip(batches, references, strict=True):
            self._backward(batch, ref_logprobs_N, scale_Q, table)
        failpoint("train.mid_step")
        grad_norm = self._clipped_norm()
        self._optimizer.step()
        self.policy_version += 1
        self.ranks.sum(table.values_KN)
        return table.report(grad_norm)

    def sleep(self) -> None:
        """Puts parameters and optimizer into the CPU's memory, and gives the device's back.

        Until `wake` it can't compute. It can be saved: its tensors are the same, elsewhere.
        """
        self._optimizer.zero_grad(set_to_none=True)
        move(self.policy, torch.device("cpu"), self._optimizer)

    def wake(self) -> None:
        """Puts them back, bit for bit what they were."""
        move(self.policy, self.ranks.device, self._optimizer)

    def microbatches(self, samples: Sequence[Sample]) -> list[Microbatch]:
        """How a step of all ranks together goes through `samples`."""
        return microbatches(samples, self._max_tokens_per_microbatch, self.ranks.data_size)

    def logprobs_of(self, batch: Microbatch) -> torch.Tensor:
        """[N, V] log π of every token that could stand in a response token's place, nats, on the policy's device."""
        return self.policy.over_vocabulary(batch.to(self.ranks.device))

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """What is trained, by name."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def _frozen(self, reference: PreTrainedModel) -> PackedPolicy:
        policy = PackedPolicy(reference.eval()).requires_grad_(False)
        shard(policy, self.ranks, compute_dtype=self._compute_dtype)
        return policy.to("cpu")

    @torch.no_grad()
    def _reference_logprobs(self, batches: Sequence[Microbatch]) -> list[torch.Tensor | None]:
        """Of each microbatch [N] log π of the reference policy, nats; None where the objective needs none."""
        if self._reference is None:
            return [None] * len(batches)
        self._reference.to(self.ranks.device)
        found: list[torch.Tensor | None] = [self._reference(batch).logprobs_N for batch in batches]
        # Before anything is kept for a backward pass: the two never need room at the same time.
        self._reference.to("cpu")
        return found

    def _backward(
        self, batch: Microbatch, ref_logprobs_N: torch.Tensor | None, scale_Q: torch.Tensor, table: TokenTable
    ) -> None:
        """Adds the gradient of this microbatch's share of the objective."""
        found = self.policy(batch)
        judged, kl_L = self.objective.judge(batch, found.logprobs_N, ref_logprobs_N)
        scale_L = scale_Q[list(batch.places)].to(self.ranks.device)[batch.response_N[batch.loss_mask_N]]
        total = (scale_L * (judged.loss + self.objective.kl_coefficient * kl_L)).sum()
        # Of a microbatch without loss too: the other ranks wait for this one in every layer.
        total.backward()
        table.enter(batch, found, judged, scale_L * judged.loss, kl_L)

    def _clipped_norm(self) -> float:
        """The gradient's norm before it is scaled down. Raises TrainingDiverged where it is not finite."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters().values(), self._max_grad_norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if not norm.isfinite():
            raise TrainingDiverged(
                f"the gradient of {self.loss.name} on the way to version {self.policy_version + 1} has norm "
                f"{norm.item()}; expected a finite one, as fresher rollouts or a smaller learning rate keep it"
            )
        return norm.item()

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """The live tensors that a resumed trainer needs, by kind and name, as checkpoints have them."""
        scaling = next((parts(layer)[2] for layer in adapters(self.model).values()), None)
        return policy_state(self._parameters(), self._optimizer, scaling)

    def state(self) -> dict[str, bytes]:
        """Everything a resumed trainer needs, of a trainer that is alone, as files by name: bit for bit what it was."""
        return lone_files(self.tensors())

    def train_with(self, loss: Loss) -> None:
        """From the next step on it descends along another loss; all else stays."""
        self.objective = replace(self.objective, loss=loss)

    @torch.no_grad()
    def become(self, other: "Trainer") -> None:
        """Takes over weights, optimizer state and version of another trainer of the same model; its loss stays."""
        theirs = dict(other.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            parameter.copy_(theirs[name])
            slots = other._optimizer.state.get(theirs[name], {})
            self._optimizer.state[parameter] = {key: value.clone() for key, value in slots.items()}
        self.policy_version = other.policy_version

    def restore(self, policy_version: int, files: Mapping[str, bytes]) -> None:
        """Takes over a checkpoint's files, whichever ranks wrote them; every rank has to be given the same.

        Raises WeightsMismatch where they are of another model, and StreamCorrupt; then this rank is as it was.
        """
        restore_policy_state(self._parameters(), self._optimizer, files)
        self.policy_version = policy_version
