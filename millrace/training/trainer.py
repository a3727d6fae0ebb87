"""One policy being trained: batches of samples in, new policy versions and step reports out.

    samples ─► microbatches ─► own share ─► log π ─► objective ─► gradients summed ─► clipped ─► AdamW ─► version + 1
               the same on every rank                 │          └─ over ranks after each microbatch: no rank
                                                      │             ever holds a whole gradient
                                                      └─ samples without advantage: measured, without a backward pass

Every rank gets the same samples. So each rank knows the lengths of the whole batch, and no counts have to be sent. The
trainer knows nothing of streams, where checkpoints are stored or how ranks are started: `stages/train.py` does that.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from configs.training import TrainingConfig
from millrace.errors import TrainingDiverged
from millrace.models.offload import move
from millrace.training.batch import Microbatch, Sample, microbatches, pack
from millrace.training.checkpoints.image import lone_files
from millrace.training.checkpoints.policy_state import policy_state, restore_policy_state
from millrace.training.losses.base import Loss
from millrace.training.objective import Objective
from millrace.training.parallel.lora import adapters, add_adapters, parts
from millrace.training.parallel.ranks import ALONE, Ranks
from millrace.training.parallel.sharding import full_tensors, shard
from millrace.training.policy import PackedPolicy
from millrace.training.step_report import StepReport, TokenTable
from storage.failpoints import failpoint


class Trainer:
    """A policy, its optimizer and its version. Each rank has one, and all ranks call the same methods.

    `max_new_tokens` is the maximum length of a response. `reference` is the start model, required exactly if
    `training.kl.coefficient` is above 0; it never changes, and stays in the CPU's memory between steps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        training: TrainingConfig,
        *,
        max_new_tokens: int,
        reference: PreTrainedModel | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        if (reference is None) != (training.kl.coefficient == 0):
            raise ValueError("a reference policy is wanted where the objective's KL has a coefficient, and only there")
        if (rank := training.lora.rank) is not None:
            add_adapters(model, rank=rank, alpha=training.lora.alpha, target_modules=training.lora.target_modules)
        dtype = training.compute_dtype
        self._compute_dtype: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
        self.policy = PackedPolicy(
            model.train(),
            router_replay=training.router_replay,
            balances_experts=training.router_aux_loss_coefficient > 0,
        )
        shard(self.policy, ranks, compute_dtype=self._compute_dtype)
        self.policy_version = 0
        self.ranks = ranks
        self.before_update: Callable[[], None] = lambda: None
        """Called in each step before parameters and optimizer state change, so that others can finish reading them."""
        self._objective = Objective(training, max_new_tokens)
        self._training = training
        if training.activation_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._reference = None if reference is None else self._frozen(reference)
        self._optimizer = torch.optim.AdamW(
            self._parameters().values(), lr=training.learning_rate, weight_decay=training.weight_decay
        )

    @property
    def model(self) -> PreTrainedModel:
        """The policy as a transformers model. Compute through `policy`, not through this."""
        return self.policy.model

    @property
    def loss(self) -> Loss:
        """The policy-gradient loss."""
        return self._objective.loss

    def weights(self) -> dict[str, torch.Tensor]:
        """The base model's parameters by name, whole, adapters merged in; tied ones appear once.

        Without other ranks and adapters these are the live tensors, which change with the next step.
        """
        return dict(full_tensors(self.model))

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the policy knows."""
        size: int = self.model.config.vocab_size
        return size

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        """log π of the `most` likeliest next tokens after `tokens`, nats, at temperature 1, under the live weights."""
        follows = Sample(
            prompt_tokens=np.array(tokens, dtype=np.int32),
            # A placeholder for the next token: no position before it sees it.
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
        """One optimizer step on all `samples`, the same on every rank; the policy version grows by one.

        Raises InputError if no token of `samples` carries loss, and TrainingDiverged where log-probabilities or the
        gradient are not finite; weights, optimizer and version then stay as they are.
        """
        scale_Q = self._objective.scale(samples)
        pulling = [place for place, sample in enumerate(samples) if self._objective.pulls(sample)]
        others = sorted(set(range(len(samples))) - set(pulling))
        batches = self._own_microbatches(samples, pulling)
        num_pulling = len(batches)
        batches += self._own_microbatches(samples, others)
        references = self._reference_logprobs(batches)
        table = TokenTable(samples, self.ranks.device)
        self._zero_gradients()
        balance_scale = self._training.router_aux_loss_coefficient / max(1, len(pulling))
        for number, (batch, ref_logprobs_N) in enumerate(zip(batches, references, strict=True)):
            pulls = number < num_pulling
            self._pass(batch, ref_logprobs_N, scale_Q, table, balance_scale=balance_scale, pulls=pulls)
        failpoint("train.mid_step")
        grad_norm = self._clipped_norm()
        self.before_update()
        self._optimizer.step()
        self.policy_version += 1
        self.ranks.sum(table.values_KN)
        return table.report(grad_norm)

    def sleep(self) -> None:
        """Moves parameters and optimizer state to the CPU's memory, and frees the device's.

        Until `wake` the trainer can't compute, but it can be saved.
        """
        self._optimizer.zero_grad(set_to_none=True)
        move(self.policy, torch.device("cpu"), self._optimizer)

    def wake(self) -> None:
        """Moves parameters and optimizer state back to the device, bit for bit as they were."""
        move(self.policy, self.ranks.device, self._optimizer)

    def microbatches(self, samples: Sequence[Sample]) -> list[Microbatch]:
        """All of `samples` in microbatches of the configured size, for all ranks together."""
        return microbatches(samples, self._training.max_tokens_per_microbatch, self.ranks.data_size)

    def logprobs_of(self, batch: Microbatch) -> torch.Tensor:
        """[N, V] log π of every token of the vocabulary at each response token, nats, on the policy's device."""
        return self.policy.over_vocabulary(batch.to(self.ranks.device))

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by name: all, or those of the adapters."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def _own_microbatches(self, samples: Sequence[Sample], places: Sequence[int]) -> list[Microbatch]:
        """This rank's microbatches of the samples at `places`, on its device; every rank has as many."""
        most, ranks = self._training.max_tokens_per_microbatch, self.ranks
        batches = microbatches(samples, most, ranks.data_size, places=places)
        return [batch.to(ranks.device) for batch in batches[ranks.data_rank :: ranks.data_size]]

    def _zero_gradients(self) -> None:
        """Sets the gradient to 0, not to None: AdamW's momentum moves the weights in a step without gradient too."""
        for parameter in self._parameters().values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                # In place: taking as much memory from the system again can cost as much as the optimizer's update.
                parameter.grad.zero_()

    def _frozen(self, reference: PreTrainedModel) -> PackedPolicy:
        policy = PackedPolicy(reference.eval()).requires_grad_(False)
        shard(policy, self.ranks, compute_dtype=self._compute_dtype)
        return policy.to("cpu")

    @torch.no_grad()
    def _reference_logprobs(self, batches: Sequence[Microbatch]) -> list[torch.Tensor | None]:
        """[N] log π of the reference policy per microbatch, nats; None if there is no reference."""
        if self._reference is None:
            return [None] * len(batches)
        self._reference.to(self.ranks.device)
        found: list[torch.Tensor | None] = [self._reference(batch).logprobs_N for batch in batches]
        # Before activations are kept for a backward pass: the two never need memory at the same time.
        self._reference.to("cpu")
        return found

    def _pass(
        self,
        batch: Microbatch,
        ref_logprobs_N: torch.Tensor | None,
        scale_Q: torch.Tensor,
        table: TokenTable,
        *,
        balance_scale: float,
        pulls: bool,
    ) -> None:
        """Measures a microbatch; if it `pulls`, adds the gradient of its share of the objective.

        `balance_scale` is the factor of each sequence's imbalance between experts.
        """
        with torch.set_grad_enabled(pulls):
            found = self.policy(batch)
            losses, kl_L = self._objective.token_losses(batch, found.logprobs_N, ref_logprobs_N)
            scale_L = scale_Q[list(batch.places)].to(self.ranks.device)[batch.response_N[batch.loss_mask_N]]
            total = (scale_L * (losses.loss + self._objective.kl.coefficient * kl_L)).sum()
            if balance_scale:
                total = total + balance_scale * self.policy.routing.imbalance(batch)
        if pulls:
            # Also where this rank's microbatch is a dummy: FSDP needs every rank in every layer.
            total.backward()
        table.enter(batch, found, losses, scale_L * losses.loss, kl_L)

    def _clipped_norm(self) -> float:
        """Clips the gradient; returns its norm before that. Raises TrainingDiverged if the norm is not finite."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters().values(), self._training.max_grad_norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if not norm.isfinite():
            raise TrainingDiverged(
                f"the gradient of {self.loss.name} on the way to version {self.policy_version + 1} has norm "
                f"{norm.item()}; expected a finite one, as fresher rollouts or a smaller learning rate keep it"
            )
        return norm.item()

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """The live tensors that a checkpoint holds, by kind and name."""
        scaling = next((parts(layer)[2] for layer in adapters(self.model).values()), None)
        return policy_state(self._parameters(), self._optimizer, scaling)

    def state(self) -> dict[str, bytes]:
        """A checkpoint's files by name, for a trainer without other ranks; `restore` takes them bit for bit."""
        return lone_files(self.tensors())

    def train_with(self, loss: Loss) -> None:
        """Uses another loss from the next step on; everything else stays."""
        self._objective.loss = loss

    @torch.no_grad()
    def become(self, other: "Trainer") -> None:
        """Copies weights, optimizer state and version from another trainer of the same model; the loss stays."""
        theirs = dict(other.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            parameter.copy_(theirs[name])
            slots = other._optimizer.state.get(theirs[name], {})
            self._optimizer.state[parameter] = {key: value.clone() for key, value in slots.items()}
        self.policy_version = other.policy_version

    def restore(self, policy_version: int, files: Mapping[str, bytes]) -> None:
        """Restores a checkpoint from its files, written by any number of ranks; every rank gets the same files.

        Raises WeightsMismatch if they belong to another model, and StreamCorrupt; this rank then stays as it was.
        """
        restore_policy_state(self._parameters(), self._optimizer, files)
        self.policy_version = policy_version
