"""The generate stage: prompts in, trajectories with their behaviour policy's log-probabilities out.

    newest weights ◄── sync_weights          trainer's sign of life: groups dropped
          │                                          │
          ▼                                          ▼
    ┌► take weights ─► may group n be admitted? ──no──► wait ─┐
    │                          │ yes                          │
    │                          ▼                              │
    │         prompts n, n+G, … ─► engine ─► in order ─► group commit ──► ║ trajectories/<generator> ║
    └─────────────────────────────────────────────────────────┘

Consumes: weights, prompts. Waits for: its first weights, then room under the staleness bound. Produces: whole groups.
Generator g of G makes the groups n with n mod G = g, in order, so the stream itself says where to resume. New weights
are taken while groups are in flight: those go on under them, and their version spans say from which token on. Where the
run has an environment, the engine plays it, and a rollout has several turns (`environments/episodes.py`). Where trainer
and generators share a device, it sleeps while there is nothing to make (`millrace/device.py`). Weights of a new
incarnation mean that the trainer was rolled back: what is in flight is forgotten, and the generator goes back behind
the last of its groups that the trainer will still take.
"""

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from millrace.device import open_device
from millrace.engines.base import Engine
from millrace.engines.factory import make_engine
from millrace.environments.episodes import in_environment
from millrace.environments.factory import environment_class
from millrace.errors import WeightsCorrupt
from millrace.groups_in_flight import GroupsInFlight
from millrace.lineage import Lineage
from millrace.model import load_tokenizer, start_folder
from millrace.position import next_group
from millrace.probe import NUM_LOGPROBS, largest_difference, tolerance_between
from millrace.prompts import PromptOrder
from millrace.stages.inputs import load_prompt_set
from millrace.stages.process import Stage, run_stage
from millrace.stages.turns import Turns
from millrace.staleness import admission_limit
from millrace.trajectories import Rollout, trajectory_table
from millrace.types import Prompt, Sampling
from millrace.weights.base import Weights, WeightsId
from millrace.weights.factory import generator_end
from millrace.weights.fallback import FallbackReader
from storage import layout
from storage.failpoints import failpoint
from storage.group_commit import GroupCommit
from storage.progress import read_life
from storage.schema import TRAJECTORY
from storage.stream import StreamWriter

_COLLECT_SECONDS = 0.02
"""How long to wait for a finished trajectory before looking for new weights again."""


def main(stage: Stage) -> None:
    """Generates until asked to drain."""
    config = stage.config
    generation, weights = config.generation, config.weights
    torch.set_num_threads(generation.threads)
    device = open_device(stage.arguments.handover, colocated=config.placement.colocated, alone=False)
    if device.shared and not stage.wait(device.take, why="waiting for the trainer to give the device back"):
        return
    started = time.monotonic()
    with stage.loading():
        folder = start_folder(stage.store, config.model.path, stage.arguments.handover)
        tokenizer = load_tokenizer(folder)
        engine = _engine(stage, folder, tokenizer)
    order = PromptOrder(load_prompt_set(config).train, seed=config.seed, shuffle=config.prompts.shuffle)
    reader = generator_end(
        weights.transport,
        stage.store,
        stage.arguments.handover,
        stage.replica,
        deadline_seconds=weights.deadline_seconds,
    )
    stream = StreamWriter(
        stage.store,
        layout.trajectories(stage.replica),
        TRAJECTORY,
        writer=f"generate-{stage.replica}",
        vocab_size=engine.vocab_size,
        group_size=generation.group_size,
    )
    stage.ready(
        f"generator {stage.replica} ready after {stream.rows} trajectories (epoch {stream.epoch}), "
        f"{generation.engine} started in {time.monotonic() - started:.1f} s"
    )
    storage = config.storage
    commits = GroupCommit(
        stream,
        max_rows=storage.commit_max_rows,
        max_bytes=storage.commit_max_bytes,
        max_seconds=storage.commit_max_ms / 1000,
    )
    with closing(engine), closing(reader), commits:
        turns = Turns(stage, device, engine)
        Generator(stage, engine, turns, tokenizer, order, reader, stream.epoch, commits).run()
    stage.milestone(f"generator {stage.replica} drained after {stream.rows} trajectories")


def _engine(stage: Stage, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """What the run samples with, in its environment if it has one."""
    config, generation = stage.config, stage.config.generation

    def engine(stop: Sequence[str]) -> Engine:
        return make_engine(
            generation.engine,
            folder,
            tokenizer,
            dtype=config.generation_dtype,
            engine_args=generation.engine_args,
            stop=stop,
            sleeps=config.placement.colocated,
        )

    def each_turn() -> None:
        # A rollout of many turns may take long: each of them shows that the stage gets on.
        stage.owing = False
        stage.progress()

    environment = environment_class(config.environment.name)
    return in_environment(engine, environment, tokenizer, max_turns=config.environment.max_turns, each_turn=each_turn)


class Generator:
    """The loop above."""

    def __init__(
        self,
        stage: Stage,
        engine: Engine,
        turns: Turns,
        tokenizer: PreTrainedTokenizerBase,
        order: PromptOrder,
        reader: FallbackReader,
        epoch: int,
        commits: GroupCommit,
    ) -> None:
        self.stage = stage
        self.engine = engine
        self.turns = turns
        self.tokenizer = tokenizer
        self.order = order
        self.reader = reader
        self.epoch = epoch
        self.commits = commits
        self.weights: WeightsId | None = None
        # Newer ones that wait until the device is this generator's.
        self.arrived: Weights | None = None
        # Number of the group to make next, known once the first weights are here.
        self.next_group = 0
        # Newest version in the parts committed under these weights' incarnation.
        self.newest = 0
        self.environment_failed = False
        generation = stage.config.generation
        self.groups = GroupsInFlight(generation.group_size, stage.config.seed)
        self.sampling = Sampling(
            temperature=generation.temperature, top_p=generation.top_p, max_new_tokens=generation.max_new_tokens
        )

    def run(self) -> None:
        """Until asked to drain; what is committed then is whole, and what is in flight is made again later."""
        # A stage that is asked to drain waits for nothing in flight: that may take minutes.
        while not self.stage.draining and self.stage.wait(
            self._ready, why="waiting for weights or room under max_staleness"
        ):
            with self.stage.busy("generate"):
                self._admit()
                self._collect()
            self._commit()

    def _collect(self) -> None:
        finished = self.engine.collect(_COLLECT_SECONDS)
        for sampled in finished:
            self.groups.add(sampled)
            if sampled.response.environment_error is not None:
                self._count_error(sampled.response.environment_error)
        if finished:
            self.stage.owing = False
            self.stage.progress()

    def _count_error(self, error: str) -> None:
        """A rollout whose environment raised is data, and an error in the ledger; the first of them is also said."""
        errors = self.stage.value("environment_errors") + 1
        if not self.environment_failed:
            self.environment_failed = True
            self.stage.milestone(
                f"generator {self.stage.replica}: environment {self.stage.config.environment.name} raised {error}; "
                "that rollout is an error, and later ones are counted without a word"
            )
        self.stage.progress(environment_errors=errors)

    def _ready(self) -> bool:
        # An engine may take weights again and again and never return what it was given. While it has something in
        # flight, what it returns is the only sign that the stage gets on.
        self.stage.owing = self.engine.in_flight > 0
        self._look_for_weights()
        if self.arrived is None and not self._has_work():
            self.turns.end()
            return False
        if not self.turns.begin():
            return False
        if self.arrived is None:
            return True
        weights, self.arrived = self.arrived, None
        self._update_weights(weights)
        return self._has_work()

    def _has_work(self) -> bool:
        return self.weights is not None and bool(self.engine.in_flight or self._admissible())

    def _look_for_weights(self) -> None:
        if self.arrived is not None:
            return
        try:
            self.arrived = self.reader.take(self.weights)
        except WeightsCorrupt as error:
            kept = "no weights yet" if self.weights is None else f"version {self.weights.policy_version}"
            self.stage.milestone(f"generator {self.stage.replica} goes on with {kept}: {error}")

    def _update_weights(self, weights: Weights) -> None:
        if self.weights is None or self.weights.incarnation != weights.id.incarnation:
            self._go_back(weights.id.incarnation)
        with self.stage.busy("update_weights"):
            pause_seconds = self.engine.update_weights(weights)
        failpoint("generate.before_acknowledgement")
        self.weights = weights.id
        fingerprint = weights.manifest.fingerprint
        assert fingerprint is not None
        # The acknowledgement: sync_weights looks for it.
        self.stage.progress(
            now=True,
            policy_version=weights.id.policy_version,
            incarnation=weights.id.incarnation,
            t_updated=time.time(),
            weights_digest=fingerprint.digest,
            weights_route=self.reader.last_route,
            pause_seconds=pause_seconds,
        )
        self.stage.metrics.log(
            incarnation=weights.id.incarnation,
            policy_version=weights.id.policy_version,
            pause_seconds=pause_seconds,
            **{f"delivery/{self.reader.last_route}/seconds": time.time() - weights.id.t_offered},
        )
        self._probe(weights)

    def _probe(self, weights: Weights) -> None:
        """Says so, with the numbers, where the engine does not mean by this version what the trainer does."""
        probe = weights.manifest.probe
        if probe is None:
            return
        config = self.stage.config
        with self.stage.busy("probe"):
            found = self.engine.next_logprobs(probe.tokens, NUM_LOGPROBS)
        difference, numbers = largest_difference(probe, found)
        tolerance = config.weights.probe_tolerance or tolerance_between(config.model.dtype, config.generation_dtype)
        alarms = self.stage.value("probe_alarms")
        if difference > tolerance:
            alarms += 1
            self.stage.milestone(
                f"ALARM: generator {self.stage.replica} and the trainer disagree about version "
                f"{weights.id.policy_version}: log-probabilities of the same tokens differ by {difference:.2g} nats, "
                f"more than {tolerance:g} ({numbers})"
            )
        self.stage.progress(probe_difference=difference, probe_alarms=alarms)
        self.stage.metrics.log(
            incarnation=weights.id.incarnation, policy_version=weights.id.policy_version, probe_difference=difference
        )

    def _go_back(self, incarnation: int) -> None:
        """Behind the last group that the trainer of this incarnation will take."""
        self.engine.abort()
        self.groups.clear()
        self.commits.flush()
        store, replicas = self.stage.store, self.stage.config.generation.replicas
        self.next_group = next_group(store, self.stage.replica, replicas, Lineage.of(store, incarnation))
        self.newest = 0

    def _admissible(self) -> list[int]:
        """Group numbers that may be put in flight: what the staleness bound and the engine's share have room for."""
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
        at_once = config.training.groups_per_step if self._in_step else config.generation.groups_per_batch
        room = max(0, at_once - len(self.groups))
        replicas = config.generation.replicas
        return [n for n in range(self.next_group, self.next_group + room * replicas, replicas) if n < limit]

    @property
    def _in_step(self) -> bool:
        return self.stage.config.pipeline.mode == "sync"

    def _admit(self) -> None:
        t_admitted = time.time()
        for group_id in self._admissible():
            prompt = self.order.prompt_at(group_id)
            requests = self.groups.admit(group_id, prompt, self._tokens(prompt), t_admitted)
            self.engine.submit(requests, self.sampling)
            self.next_group = group_id + self.stage.config.generation.replicas

    def _commit(self) -> None:
        """Commits the groups that are whole; in sync mode, once all of the step are."""
        if self._in_step and self.engine.in_flight:
            return
        rollouts = self.groups.take()
        if not rollouts:
            return
        failpoint("generate.before_commit")
        with self.stage.busy("commit"):
            num_tokens = self._append(rollouts)
            if self._in_step:
                # Everybody waits for this share of the step.
                self.commits.flush()
        self.stage.progress(rollouts=self.commits.rows, tokens=self.stage.value("tokens") + num_tokens)

    def _append(self, rollouts: list[Rollout]) -> int:
        """Returns how many response tokens these are."""
        assert self.weights is not None
        table = trajectory_table(
            rollouts,
            first_row_id=self.commits.rows,
            sampling=self.sampling,
            incarnation=self.weights.incarnation,
            generator=self.stage.replica,
            epoch=self.epoch,
        )
        versions = [version for rollout in rollouts for version, _ in rollout.response.version_spans]
        # A group that was whole early and waited for one before it may be of older weights than that one. Parts are
        # taken or refused by this number when a trainer is rolled back: it must never fall, or a part would be taken
        # whose predecessor is made once more.
        self.newest = max(self.newest, *versions)
        num_tokens = sum(len(rollout.response.tokens) for rollout in rollouts)
        self.commits.append(
            table,
            tokens=num_tokens,
            min_policy_version=min(versions),
            max_policy_version=self.newest,
            incarnation=self.weights.incarnation,
            last_group_id=rollouts[-1].group_id,
        )
        return num_tokens

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self.tokenizer(prompt.text)["input_ids"])


if __name__ == "__main__":
    run_stage("generate", main)
