"""One policy being trained: batches of samples in, new policy versions and step reports out.

    batch ─► updates: one on all samples, or one on each minibatch of each epoch ─► version + 1

    an update: samples ─► microbatches ─► own share ─► log π ─► objective ─► gradients summed ─► clipped ─► AdamW
                          the same on every rank                 │          └─ over ranks after each microbatch: no
                                                                 │             rank ever holds a whole gradient
                                                                 └─ samples without advantage: measured, without a
                                                                    backward pass

Every rank gets the same samples, so each knows the lengths of the whole batch. The trainer knows nothing of streams,
stored checkpoints or how ranks are started: `stages/train/` does that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from transformers import PreTrainedModel

from configs.training import TrainingConfig
from millrace.errors import DeviceOutOfMemory
from millrace.models.compiler import missing_for_compilation
from millrace.models.loading import load_model
from millrace.models.modules import move, visiting
from millrace.training.batch import Microbatch, Sample
from millrace.training.checkpoints.files import lone_files
from millrace.training.checkpoints.policy_state import policy_state, restore_policy_state
from millrace.training.layers import prepare_layers
from millrace.training.lora import adapters, add_adapters, parts
from millrace.training.losses.factory import Loss
from millrace.training.objective import Objective, Objectives
from millrace.training.optimizer import (
    clip_gradients,
    freeze_prefix,
    make_optimizer,
    plan_updates,
    planned_rate,
    zero_gradients,
)
from millrace.training.packing import microbatches, pack
from millrace.training.parallel.loading import StartModel
from millrace.training.parallel.ranks import ALONE, Ranks
from millrace.training.parallel.sharding import adapter_tensors, base_tensors, changed_share, sample_weights, shard
from millrace.training.policy import PackedPolicy
from millrace.training.step_report import StepReport, TokenTable, ratio_effective_sample_size, report
from storage.failpoints import failpoint
from storage.stores.base import BytesLike


class Trainer:
    """A policy, its optimizer and its version. Each rank has one, and all ranks call the same methods.

    Trained weights are kept in float32 at least, with their gradients and moments: in bfloat16 most updates of a small
    learning rate would be lost. It computes in `training.compute_dtype`, or in the dtype that `model` came in.

    `trainings` are those of sources by name; only their objectives may differ. `seed` is the run's. `reference` is the
    start model, required exactly if `training.kl.coefficient` is above 0; it stays in the CPU's memory between steps.
    `published_dtype` is the number format in which generators get the weights; None: that of `model`. `start` is where
    `model` and `reference` are from if they have no values yet.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        training: TrainingConfig,
        *,
        trainings: Mapping[str, TrainingConfig] = MappingProxyType({}),
        seed: int = 0,
        reference: PreTrainedModel | None = None,
        ranks: Ranks = ALONE,
        published_dtype: torch.dtype | None = None,
        start: StartModel | None = None,
    ) -> None:
        if (reference is None) != (training.kl.coefficient == 0):
            raise ValueError("pass `reference` if and only if training.kl.coefficient > 0")
        lora, frozen_layers = training.lora, training.frozen_layers
        if lora.rank is not None:
            targets = lora.target_modules
            add_adapters(model, rank=lora.rank, alpha=lora.alpha, target_modules=targets, frozen_layers=frozen_layers)
        elif frozen_layers:
            freeze_prefix(model, frozen_layers)
        self._published_dtype = published_dtype or model.dtype
        dtype = training.compute_dtype
        self._compute_dtype: torch.dtype = model.dtype if dtype is None else getattr(torch, dtype)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        self.compiles = bool(training.compile) and not ranks.any(missing_for_compilation(ranks.device.type) != "")
        """Whether layers and log-probabilities are compiled: `training.compile`, if the hosts of all ranks can."""
        self.policy = PackedPolicy(
            model.train(),
            compiled=self.compiles,
            router_replay=training.router_replay,
            balances_experts=training.router_aux_loss_coefficient > 0,
        )
        prepare_layers(model, checkpointing=training.activation_checkpointing, compiled=self.compiles)
        shard(self.policy, ranks, compute_dtype=self._compute_dtype)
        if start is not None:
            start.fill(self.policy, ranks)
        self.policy_version = 0
        self.ranks = ranks
        self.on_progress: Callable[[], None] = lambda: None
        """Called many times in each pass, as a sign of progress."""
        self.policy.on_progress = lambda: self.on_progress()
        self._objectives = Objectives(training, trainings)
        self._training = training
        self._seed = seed
        self._reference = None
        if reference is not None:
            self._reference = PackedPolicy(reference.eval(), compiled=self.compiles).requires_grad_(False)
            self._reference.on_progress = self.policy.on_progress
            shard(self._reference, ranks, compute_dtype=self._compute_dtype)
            if start is not None:
                start.fill(self._reference, ranks)
            self._reference.to("cpu")
        self._optimizer = make_optimizer(self._parameters().values(), training, ranks.device)

    @property
    def model(self) -> PreTrainedModel:
        """The policy as a transformers model. Compute through `policy`, not through this."""
        return self.policy.model

    @property
    def loss(self) -> Loss:
        """The policy-gradient loss; sources may have others."""
        return self._objectives.of_run.loss

    def weights(self) -> dict[str, torch.Tensor]:
        """The base model's parameters by name, whole, adapters merged in; tied ones appear once.

        Without other ranks and adapters these are the live tensors, which change with the next step.
        """
        return dict(base_tensors(self.model, whole=True))

    def adapter(self) -> dict[str, torch.Tensor]:
        """A and B of every adapted layer by PEFT's names, whole; without other ranks these are the live tensors."""
        return dict(adapter_tensors(self.model))

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the policy knows."""
        size: int = self.model.config.vocab_size
        return size

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        """log π of the `most` likeliest next tokens after `tokens`, nats, at temperature 1, under the live weights."""
        # The response is a placeholder for the next token: no position before it sees it.
        logprobs_V = self.logprobs_of(pack(_made_up(tokens, num_tokens=1)))[0]
        best = logprobs_V.topk(min(most, self.vocab_size))
        return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def warm_up(self) -> None:
        """Compiles layers and log-probabilities on made-up tokens; otherwise the first step does, for a minute.

        Weights, optimizer and version stay as they are.
        """
        # No two sizes are equal, which the compiler could rely on.
        samples = [_made_up([0] * (5 + n), num_tokens=13 + 3 * n) for n in range(3 * self.ranks.data_size)]
        if self._reference is not None:
            with visiting(self._reference, self.ranks.device):
                self._entropy_and_logprobs(self._reference, samples)
        self._entropy_and_logprobs(self.policy, samples)
        for batch in self.microbatches(samples):
            logprobs_N, entropy_N, _ = self.policy(batch.to(self.ranks.device))
            # Squares have dense gradients, as losses do. Those of a plain sum would be compiled as one number.
            total = logprobs_N.square().sum()
            if self._training.entropy_coefficient:
                total = total + entropy_N.square().sum()
            total.backward()
        self._optimizer.zero_grad(set_to_none=True)

    def step(self, samples: Sequence[Sample], rate_factor: float = 1.0) -> StepReport:
        """All updates on the batch `samples`, the same on every rank; the policy version grows by one.

        `rate_factor` multiplies the learning rate of the schedule. Raises InputError if no token of `samples` is
        trainable, TrainingDiverged where log-probabilities or the gradient are not finite, and DeviceOutOfMemory.
        Optimizer and weights are then those before the update that failed, except that DeviceOutOfMemory may leave some
        of them updated.
        """
        try:
            return self._step(samples, rate_factor)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(error) from error

    def _step(self, samples: Sequence[Sample], rate_factor: float) -> StepReport:
        plan = plan_updates(
            samples,
            minibatches=self._training.minibatches,
            epochs=self._training.epochs,
            seed=self._seed,
            policy_version=self.policy_version + 1,
        )
        reference_N = None
        if self._reference is not None:
            # Before activations are kept for a backward pass: the two never need memory at the same time.
            with visiting(self._reference, self.ranks.device):
                reference_N = self._entropy_and_logprobs(self._reference, samples)[1]
        before_2N = self._entropy_and_logprobs(self.policy, samples) if len(plan) > 1 else None
        before_N = None if before_2N is None else before_2N[1]
        weights = sample_weights(self.model, self._published_dtype)
        updates = [self._update(samples, indices, before_N, reference_N, rate_factor) for indices in plan]
        share = changed_share(weights, sample_weights(self.model, self._published_dtype), self.ranks)
        self.policy_version += 1
        before_2N = updates[0].policy_2N if before_2N is None else before_2N
        return report(samples, updates, before_2N, changed_weight_share=share)

    def _out_of_memory(self, error: torch.OutOfMemoryError) -> DeviceOutOfMemory:
        training = self._training
        remedies = ["a smaller number"]
        if training.activation_checkpointing is not True:
            remedies.append("training.activation_checkpointing: true")
        if not training.optimizer_offload:
            remedies.append("training.optimizer_offload: true")
        # The allocator's first sentences hold the numbers; the others are advice about its settings.
        numbers = ". ".join(str(error).split(". ")[:4]).rstrip(".")
        return DeviceOutOfMemory(
            f"{training.max_tokens_per_microbatch}, and the step to version {self.policy_version + 1} ran out of "
            f"memory on {self.ranks.device} ({numbers})",
            key="training.max_tokens_per_microbatch",
            expected=" or ".join([*remedies, "more data ranks (training.parallel.data)"]),
        )

    def sleep(self) -> None:
        """Moves parameters and optimizer state to the CPU's memory; until `wake` the trainer can only be saved."""
        self._optimizer.zero_grad(set_to_none=True)
        move(self.policy, torch.device("cpu"), self._moved_optimizer)

    def wake(self) -> None:
        """Moves parameters and optimizer state back to the device, bit for bit as they were."""
        move(self.policy, self.ranks.device, self._moved_optimizer)

    def microbatches(self, samples: Sequence[Sample], indices: Sequence[int] | None = None) -> list[Microbatch]:
        """This rank's microbatches of the samples at `indices`, by default all; every rank has as many."""
        return microbatches(
            samples,
            self._training.max_tokens_per_microbatch,
            self.ranks.data_size,
            rank=self.ranks.data_rank,
            indices=indices,
            share_prefixes=self._training.share_prefixes,
            hidden_size=self.model.config.hidden_size,
        )

    def logprobs_of(self, batch: Microbatch) -> torch.Tensor:
        """[N, V] log π of every token of the vocabulary at each response token, nats, on the policy's device."""
        return self.policy.over_vocabulary(batch.to(self.ranks.device))

    @property
    def _moved_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose state moves with the parameters; None if it is offloaded, and never on the device."""
        return None if self._training.optimizer_offload else self._optimizer

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by name: all that are not frozen, or those of the adapters."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def _own_microbatches(
        self, samples: Sequence[Sample], indices: Sequence[int]
    ) -> Iterator[tuple[Objective, bool, Microbatch]]:
        """The microbatches on the rank's device, each with its objective, and whether it adds to the gradient.

        Samples that differ in either share no microbatch.
        """
        for objective, alike in self._objectives.split(samples, indices):
            with_gradient = [index for index in alike if objective.has_gradient(samples[index])]
            without_gradient = sorted(set(alike) - set(with_gradient))
            for has_gradient, share in ((True, with_gradient), (False, without_gradient)):
                batches = self.microbatches(samples, share)
                yield from [(objective, has_gradient, batch.to(self.ranks.device)) for batch in batches]

    def _update(
        self,
        samples: Sequence[Sample],
        indices: Sequence[int],
        before_N: torch.Tensor | None,
        reference_N: torch.Tensor | None,
        rate_factor: float,
    ) -> TokenTable:
        """Makes one optimizer update on the samples at `indices` of the batch. Returns its measures."""
        scale_Q = self._objectives.scale(samples, indices)
        balance_scale = 0.0
        if coefficient := self._training.router_aux_loss_coefficient:
            num_with_gradient = sum(
                objective.has_gradient(samples[index])
                for objective, alike in self._objectives.split(samples, indices)
                for index in alike
            )
            balance_scale = coefficient / max(1, num_with_gradient)
        table = TokenTable(samples, self.ranks.device)
        parameters = self._parameters().values()
        zero_gradients(parameters)
        for objective, has_gradient, batch in self._own_microbatches(samples, indices):
            with torch.set_grad_enabled(has_gradient):
                logprobs_N, entropy_N, forward_kl_N = self.policy(batch)
                outputs = objective.compute(batch, logprobs_N, before_N, reference_N)
                scale_L = scale_Q[list(batch.indices)].to(self.ranks.device)[batch.response_N[batch.trainable_L]]
                forward_kl_L = None if forward_kl_N is None else forward_kl_N[batch.trainable_L]
                value_L = objective.value(outputs, entropy_N[batch.trainable_L], forward_kl_L)
                total = (scale_L * value_L).sum()
                if balance_scale:
                    total = total + balance_scale * self.policy.routing.imbalance(batch)
            table.add(batch, logprobs_N, entropy_N, forward_kl_N, outputs, scale_L)
            if has_gradient:
                # Also where this rank's microbatch is a dummy: FSDP needs every rank in every layer.
                total.backward()
            # Otherwise their graph would stay while the next one is made.
            del logprobs_N, entropy_N, forward_kl_N, forward_kl_L, outputs, value_L, total
        failpoint("train.mid_step")
        version = self.policy_version + 1
        what = f"the gradient of {self.loss.name} on the way to version {version}"
        table.grad_norm = clip_gradients(parameters, self._training.max_grad_norm, what)
        table.finish(self.ranks, indices)
        table.learning_rate = planned_rate(self._training, version) * rate_factor
        if self._training.schedule.ess_scaling:
            # VCPO, arXiv 2602.17616. There the ratios are those of whole responses; here of tokens, as in most losses.
            table.learning_rate *= float(ratio_effective_sample_size(table.tokens["log_ratio"]).sqrt())
        for group in self._optimizer.param_groups:
            group["lr"] = table.learning_rate
        self._optimizer.step()
        return table

    @torch.no_grad()
    def _entropy_and_logprobs(self, policy: PackedPolicy, samples: Sequence[Sample]) -> torch.Tensor:
        """[2, N] float64 entropy and log π of all response tokens of the batch, nats, the same on every rank."""
        num_tokens = sum(len(sample.response_tokens) for sample in samples)
        values_2N = torch.zeros(2, num_tokens, dtype=torch.float64, device=self.ranks.device)
        # In the microbatches of a single update on the batch, so that rounding is the same.
        for _, _, batch in self._own_microbatches(samples, range(len(samples))):
            logprobs_N, entropy_N, _ = policy(replace(batch, teacher_top=None))
            values_2N[:, batch.in_batch_N] = torch.stack([entropy_N, logprobs_N]).double()
        return self.ranks.sum(values_2N)

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """The live tensors that a checkpoint holds, by kind and name."""
        scaling = next((parts(layer)[2] for layer in adapters(self.model).values()), None)
        return policy_state(self._parameters(), self._optimizer, scaling, self._training.frozen_layers)

    def state(self) -> dict[str, bytes]:
        """A checkpoint's files by name, for a trainer without other ranks; `restore` takes them bit for bit."""
        return lone_files(self.tensors())

    def set_loss(self, loss: Loss) -> None:
        """Uses another loss from the next step on, for all sources; everything else stays."""
        self._objectives.set_loss(loss)

    @torch.no_grad()
    def copy_state_from(self, other: "Trainer") -> None:
        """Copies weights, optimizer state and version from another trainer of the same model; the loss stays."""
        sources = dict(other.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            parameter.copy_(sources[name])
            slots = other._optimizer.state.get(sources[name], {})
            self._optimizer.state[parameter] = {key: value.clone() for key, value in slots.items()}
        self.policy_version = other.policy_version

    def restore(self, policy_version: int, files: Mapping[str, BytesLike]) -> None:
        """Restores a checkpoint from its files, written by any number of ranks; every rank gets the same files.

        Raises WeightsMismatch if they belong to another model, InputError if another number of layers was frozen, and
        StreamCorrupt; this rank then stays as it was.
        """
        restore_policy_state(self._parameters(), self._optimizer, files, self._training.frozen_layers)
        self.policy_version = policy_version


def _made_up(prompt: Sequence[int], *, num_tokens: int) -> Sample:
    """A response of as many tokens 0 that is in no loss."""
    return Sample(
        prompt_tokens=np.array(prompt, dtype=np.int32),
        response_tokens=np.zeros(num_tokens, dtype=np.int32),
        rollout_logprobs=np.zeros(num_tokens, dtype=np.float32),
        loss_mask=np.zeros(num_tokens, dtype=np.uint8),
        temperature=1.0,
        advantage=0.0,
        staleness=0,
        max_new_tokens=num_tokens,
    )


def load_trainer(
    kind: type[Trainer],
    folder: Path,
    training: TrainingConfig,
    *,
    trainings: Mapping[str, TrainingConfig] = MappingProxyType({}),
    dtype: str,
    generation_dtype: str,
    seed: int,
    ranks: Ranks = ALONE,
) -> Trainer:
    """A trainer of class `kind` with the start model in `folder`, loaded in `dtype`; `seed` is the run's."""
    # The same on every rank, so that all draw the same adapters.
    torch.manual_seed(seed)
    start = StartModel(folder, dtype, seed) if ranks.size > 1 else None

    def make() -> PreTrainedModel:
        return load_model(folder, dtype) if start is None else start.empty()

    return kind(
        make(),
        training,
        trainings=trainings,
        seed=seed,
        reference=make() if training.kl.coefficient else None,
        ranks=ranks,
        published_dtype=getattr(torch, generation_dtype),
        start=start,
    )
