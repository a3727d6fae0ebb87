"""The generate stage: prompts in, trajectories with their behaviour policy's log-probabilities out.

    newest weights ◄── sync_weights          trainer's sign of life: groups dropped
          │                                          │
          ▼                                          ▼
    ┌► take weights ─► may group n be admitted? ──no──► wait ─┐
    │                          │ yes                          │
    │                          ▼                              │
    │         prompts n, n+G, … ─► engine ─► group commit ──► ║ trajectories/<generator> ║
    └─────────────────────────────────────────────────────────┘

Consumes: weights, prompts. Waits for: its first weights, then room under the staleness bound. Produces: whole groups.
Generator g of G makes the groups n with n mod G = g, in order, so the stream itself says where to resume. Weights of a
new incarnation mean that the trainer was rolled back: the generator goes back too, behind the last of its groups that
the trainer will still take.
"""

import hashlib
import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from millrace.engines.transformers import TransformersEngine
from millrace.lineage import Lineage
from millrace.model import load_model, load_tokenizer, start_folder
from millrace.position import next_group
from millrace.prompts import PromptOrder
from millrace.stages.inputs import load_prompt_set
from millrace.stages.process import Stage, run_stage
from millrace.staleness import admission_limit
from millrace.trajectories import Rollout, trajectory_table
from millrace.types import Prompt, Sampling
from millrace.weights.base import WeightsId, WeightsReader
from millrace.weights.factory import generator_end
from storage import layout
from storage.failpoints import failpoint
from storage.group_commit import GroupCommit
from storage.progress import read_life
from storage.schema import TRAJECTORY
from storage.stream import StreamWriter


def main(stage: Stage) -> None:
    """Generates until asked to drain."""
    config = stage.config
    torch.set_num_threads(config.generation.threads)
    with stage.loading():
        folder = start_folder(stage.store, config.model.path, stage.arguments.handover)
        tokenizer = load_tokenizer(folder)
        engine = TransformersEngine(load_model(folder, config.model.dtype), tokenizer)
    order = PromptOrder(load_prompt_set(config).train, seed=config.seed, shuffle=config.prompts.shuffle)
    reader = generator_end(config.weights.transport, stage.store, stage.arguments.handover, stage.replica)
    stream = StreamWriter(
        stage.store,
        layout.trajectories(stage.replica),
        TRAJECTORY,
        writer=f"generate-{stage.replica}",
        vocab_size=engine.vocab_size,
        group_size=config.generation.group_size,
    )
    stage.ready(f"generator {stage.replica} ready after {stream.rows} trajectories (epoch {stream.epoch})")
    storage = config.storage
    with GroupCommit(
        stream,
        max_rows=storage.commit_max_rows,
        max_bytes=storage.commit_max_bytes,
        max_seconds=storage.commit_max_ms / 1000,
    ) as commits:
        Generator(stage, engine, tokenizer, order, reader, stream.epoch, commits).run()
    stage.milestone(f"generator {stage.replica} drained after {stream.rows} trajectories")


class Generator:
    """The loop above."""

    def __init__(
        self,
        stage: Stage,
        engine: TransformersEngine,
        tokenizer: PreTrainedTokenizerBase,
        order: PromptOrder,
        reader: WeightsReader,
        epoch: int,
        commits: GroupCommit,
    ) -> None:
        self.stage = stage
        self.engine = engine
        self.tokenizer = tokenizer
        self.order = order
        self.reader = reader
        self.epoch = epoch
        self.commits = commits
        self.weights: WeightsId | None = None
        # Number of the group to make next, known once the first weights are here.
        self.next_group = 0
        generation = stage.config.generation
        self.sampling = Sampling(
            temperature=generation.temperature, top_p=generation.top_p, max_new_tokens=generation.max_new_tokens
        )

    def run(self) -> None:
        """Until asked to drain; what is committed then is whole."""
        while self.stage.wait(self._ready, why="waiting for weights or room under max_staleness"):
            self._generate(self._admissible())

    def _ready(self) -> bool:
        self._update_weights()
        return self.weights is not None and bool(self._admissible())

    def _update_weights(self) -> None:
        weights = self.reader.take(self.weights)
        if weights is None:
            return
        with self.stage.busy("update_weights"):
            self.engine.update_weights(weights.tensors, weights.id.policy_version)
        failpoint("generate.before_acknowledgement")
        if self.weights is None or self.weights.incarnation != weights.id.incarnation:
            self._take_position(weights.id.incarnation)
        self.weights = weights.id
        # The acknowledgement: sync_weights looks for it.
        self.stage.progress(
            now=True,
            policy_version=weights.id.policy_version,
            incarnation=weights.id.incarnation,
            t_updated=time.time(),
        )

    def _take_position(self, incarnation: int) -> None:
        """Behind the last group that the trainer of this incarnation will take."""
        self.commits.flush()
        store, replicas = self.stage.store, self.stage.config.generation.replicas
        self.next_group = next_group(store, self.stage.replica, replicas, Lineage.of(store, incarnation))

    def _admissible(self) -> list[int]:
        """Group numbers of the next batch: what the staleness bound has room for, at most a batch of it."""
        config = self.stage.config
        assert self.weights is not None
        trainer = read_life(self.stage.store, "train", 0)
        limit = admission_limit(
            self.weights.policy_version,
            max_staleness=config.effective_max_staleness,
            groups_per_step=config.training.groups_per_step,
            groups_dropped=trainer.get("groups_dropped", 0),
        )
        # In sync mode a part is a whole step's share: the barrier between generation and the rest.
        batch = (
            config.training.groups_per_step if config.pipeline.mode == "sync" else config.generation.groups_per_batch
        )
        replicas = config.generation.replicas
        return [n for n in range(self.next_group, self.next_group + batch * replicas, replicas) if n < limit]

    def _generate(self, group_ids: Sequence[int]) -> None:
        """One batch of groups, committed as one part."""
        assert self.weights is not None
        t_admitted = time.time()
        group_size = self.stage.config.generation.group_size
        prompts = [self.order.prompt_at(group_id) for group_id in group_ids]
        seed = batch_seed(self.stage.config.seed, group_ids)
        with self.stage.busy("generate"):
            t_started = time.time()
            tokens = {prompt.prompt_id: self._tokens(prompt) for prompt in prompts}
            asked = [tokens[prompt.prompt_id] for prompt in prompts for _ in range(group_size)]
            responses = self.engine.generate(asked, self.sampling, seed)
            t_finished = time.time()
            table = trajectory_table(
                [
                    Rollout(
                        group_id=group_ids[i // group_size],
                        sample_index=i % group_size,
                        prompt=prompts[i // group_size],
                        prompt_tokens=asked[i],
                        response=response,
                    )
                    for i, response in enumerate(responses)
                ],
                first_row_id=self.commits.rows,
                sampling=self.sampling,
                incarnation=self.weights.incarnation,
                generator=self.stage.replica,
                epoch=self.epoch,
                seed=seed,
                times=(t_admitted, t_started, t_finished),
            )
        failpoint("generate.before_commit")
        with self.stage.busy("commit"):
            version = self.engine.policy_version
            num_tokens = sum(len(response.tokens) for response in responses)
            self.commits.append(
                table,
                tokens=num_tokens,
                min_policy_version=version,
                max_policy_version=version,
                incarnation=self.weights.incarnation,
                last_group_id=group_ids[-1],
            )
            if self.stage.config.pipeline.mode == "sync":
                # Everybody waits for this share of the step.
                self.commits.flush()
        self.next_group = group_ids[-1] + self.stage.config.generation.replicas
        self.stage.progress(
            rollouts=self.commits.rows,
            tokens=self.stage.value("tokens") + num_tokens,
        )

    def _tokens(self, prompt: Prompt) -> list[int]:
        tokens: list[int] = self.tokenizer(prompt.text)["input_ids"]
        return tokens


def batch_seed(run_seed: int, group_ids: Sequence[int]) -> int:
    """A 63-bit seed for one batch, from the run's seed and the groups in it: a rerun draws the same."""
    digest = hashlib.sha256(f"{run_seed}:{','.join(map(str, group_ids))}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


if __name__ == "__main__":
    run_stage("generate", main)
