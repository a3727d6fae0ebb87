"""A run that is really trained, and stored as the stages store one: 12 steps, rolled back once on the way.

    incarnation 0   v0 ─ … ─ v6 (checkpoint) ─ v7 ─ v8 ✗ killed
    incarnation 1             └─ v7' ─ … ─ v12                      v7 and v8 are a future that is lost

Two generators with parts of one to three groups, two scorers; a part is stale, a group has no rewards, and some single
rewards are missing. Some responses of the second generator began under weights that are too old: the trainer masked
these tokens.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from configs.schema import RunConfig
from configs.stored import DEFAULT_SOURCE, AnnotatorPools
from millrace.models.loading import load_model
from millrace.models.start_folder import store_start_model
from millrace.rollouts.arrow import trajectory_table
from millrace.rollouts.consumed import ConsumedWriter
from millrace.rollouts.group_sequence import committed_groups
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.loader import RolloutLoader
from millrace.rollouts.masking import mask_too_old
from millrace.rollouts.scored_group import LostPart, ScoredGroup
from millrace.runs.decisions import Decisions, StoredDecision, rate_factor, read_decisions
from millrace.runs.record import create_run, resume_run
from millrace.training.batch import Sample
from millrace.training.samples import samples_of
from millrace.training.trainer import Trainer
from millrace.types import Prompt, Request, Response, Sampling, Trajectory
from storage import layout
from storage.checkpoints import CheckpointWriter, load_file
from storage.schema import SCORE, TRAJECTORY
from storage.stores.local import LocalStore
from storage.streams.stream import StreamReader, StreamWriter

GENERATORS, SCORERS, GROUP_SIZE, GROUPS_PER_STEP, MAX_STALENESS = 2, 2, 4, 4, 2
LAST_STEP, KILLED_AT, CHECKPOINT_EVERY = 12, 8, 3
BEGAN_EARLY = 5
"""From this version on, the first half of the second generator's responses is three versions older."""


@dataclass
class ExpectedStep:
    """The batch and the results of one step."""

    groups: list[ScoredGroup]
    samples: list[Sample]
    logprobs: list[npt.NDArray[np.float32]]


@dataclass
class TrainedRun:
    """The run in a folder, and its steps by version, without those rolled back."""

    folder: Path
    steps: dict[int, ExpectedStep] = field(default_factory=dict)

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.folder, fsync=False)


def train_and_store(
    folder: Path, start: Path, vocab_size: int, *, decision: StoredDecision | None = None, **training: object
) -> TrainedRun:
    """The run above, in `folder`, from the model in the folder `start`; `training` changes that section's config.

    With a `decision` the first trainer was not killed, but decided that.
    """
    run = TrainedRun(folder)
    maker = _Maker(run, start, vocab_size, training)
    create_run(run.store, "run", maker.config.model_dump(mode="json"))
    store_start_model(run.store, start)
    maker.start_trainer()
    maker.train_to(KILLED_AT)
    # Its rows until then were committed, but the last checkpoint is of version 6.
    maker.consumed.close()
    if decision is not None:
        Decisions(run.store).add(decision)
    resume_run(run.store, maker.config.model_dump(mode="json"))
    maker.start_trainer()
    maker.train_to(LAST_STEP)
    maker.consumed.close()
    return run


class _Maker:
    def __init__(self, run: TrainedRun, start: Path, vocab_size: int, training: dict[str, object]) -> None:
        self.run, self.store, self.vocab_size = run, run.store, vocab_size
        self.config = RunConfig.model_validate(
            {
                "training": {
                    "max_steps": LAST_STEP,
                    "groups_per_step": GROUPS_PER_STEP,
                    "learning_rate": 1e-3,
                    "checkpoint_every": CHECKPOINT_EVERY,
                    **training,
                },
                "generation": {"replicas": GENERATORS, "group_size": GROUP_SIZE, "groups_per_batch": GENERATORS},
                "scoring": {"replicas": SCORERS},
                "staleness": {"max_staleness": MAX_STALENESS},
            }
        )
        self.start = start
        self.random = np.random.default_rng(0)
        self.made = [0] * GENERATORS
        self.trajectories = [self._writer(g) for g in range(GENERATORS)]
        self.scores = [
            [
                StreamWriter(self.store, layout.annotations("scores/exact_match", g, s, SCORERS), SCORE, f"score-{s}")
                for s in range(SCORERS)
            ]
            for g in range(GENERATORS)
        ]

    def start_trainer(self) -> None:
        self.checkpoints = CheckpointWriter(self.store)
        latest = self.checkpoints.latest
        model = load_model(self.start, "float32")
        training = self.config.training
        reference = load_model(self.start, "float32") if training.kl.coefficient else None
        self.trainer = Trainer(model, training, seed=self.config.seed, reference=reference)
        if latest is not None:
            self.trainer.restore(latest.step, {name: load_file(self.store, ref) for name, ref in latest.files.items()})
        self.incarnation = self.checkpoints.incarnation
        self.lineage = Lineage.after(latest, self.incarnation)
        # Groups of lost versions are not made again here, so they stay missing.
        self.groups = [committed_groups(self.store, g, GENERATORS, self.lineage) for g in range(GENERATORS)]
        self.consumed = ConsumedWriter(self.store, self.incarnation)
        self.intake = RolloutLoader(
            self.store,
            pools=AnnotatorPools({"scores/exact_match": SCORERS}),
            num_generators=GENERATORS,
            vocab_size=self.vocab_size,
            lineage=self.lineage,
            state=None if latest is None else latest.state["intake"],
        )

    def train_to(self, last_step: int) -> None:
        while self.trainer.policy_version < last_step:
            self._step()
            if self.trainer.policy_version % CHECKPOINT_EVERY == 0:
                self.consumed.flush()
                state = {"intake": self.intake.state(), "lineage": self.lineage.to_json(), "account": {}}
                self.checkpoints.commit(self.trainer.policy_version, self.trainer.state(), state)

    def _step(self) -> None:
        version = self.trainer.policy_version
        expected = ExpectedStep([], [], [])
        while len(expected.groups) < GROUPS_PER_STEP:
            group = self.intake.take()
            if group is None:
                self._generate(version)
                continue
            assert not isinstance(group, LostPart)
            group = mask_too_old(group, version, MAX_STALENESS)
            if reason := self._refused(group):
                self.consumed.drop(group, reason, version)
            else:
                expected.groups.append(group)
        expected.groups.sort(key=lambda group: group.group_id)
        expected.samples = samples_of(expected.groups, self.config.training, version)
        factor = rate_factor(read_decisions(self.store), self.incarnation)
        report = self.trainer.step(expected.samples, factor)
        expected.logprobs = report.trainer_logprobs
        advantages = [sample.advantage for sample in expected.samples]
        self.consumed.step(version + 1, expected.groups, advantages, expected.logprobs, report.trainer_entropies)
        self.run.steps[version + 1] = expected

    def _refused(self, group: ScoredGroup) -> str | None:
        if not self.lineage.holds(group.incarnation, group.part_max_policy_version):
            return "rolled_back"
        return "stale" if group.staleness(self.trainer.policy_version) > MAX_STALENESS else group.drop_reason

    def _generate(self, version: int) -> None:
        """A part of each generator, with its scores; the second generator is once far behind."""
        for generator in range(GENERATORS):
            sampled_by = 0 if generator == 1 and version == 4 else version
            began = version - 3 if generator == 1 and version >= BEGAN_EARLY else sampled_by
            first = self.trajectories[generator].rows
            rollouts = [
                self._rollout(generator + GENERATORS * (self.made[generator] + i), index, (began, sampled_by))
                for i in range(int(self.random.integers(1, 4)))
                for index in range(GROUP_SIZE)
            ]
            self.made[generator] += len(rollouts) // GROUP_SIZE
            tokens = sum(len(rollout.response.tokens) for rollout in rollouts)
            group_ids = list(dict.fromkeys(rollout.request.group_id for rollout in rollouts))
            for group_id in group_ids:
                self.groups[generator].add(group_id)
            record = self.trajectories[generator].write(
                trajectory_table(
                    rollouts,
                    first_row_id=first,
                    sampling={DEFAULT_SOURCE: Sampling(temperature=0.9, top_p=0.5, max_new_tokens=6)},
                    incarnation=self.incarnation,
                    generator=generator,
                    epoch=0,
                ),
                tokens=tokens,
                min_policy_version=began,
                max_policy_version=sampled_by,
                incarnation=self.incarnation,
                group_ids=group_ids,
                last_group_id=self.groups[generator].last,
                missing_groups=sorted(self.groups[generator].missing),
            )
            rewards = [self._reward(rollout) for rollout in rollouts]
            self.scores[generator][record.part % SCORERS].write(score_rows(first, rewards), tokens=tokens)

    def _rollout(self, group_id: int, index: int, versions: tuple[int, int]) -> Trajectory:
        """A trajectory; in every second group each token was drawn from at most two."""
        length = int(self.random.integers(1, 7))
        spans = tuple(zip(versions, (0, length // 2), strict=True))
        tokens = tuple(self.random.integers(3, self.vocab_size, length).tolist())
        kept = [sorted({token, 3 + index}) for token in tokens] if group_id % 2 else []
        return Trajectory(
            request=Request(
                group_id=group_id,
                sample_index=index,
                prompt=Prompt(prompt_id=f"p{group_id}", text=f"{group_id}+1=", answer="1", source="test"),
                prompt_tokens=(1, 3 + group_id % 10, 4),
                seed=0,
            ),
            response=Response(
                tokens=tokens,
                rollout_logprobs=tuple((-self.random.exponential(2.0, length)).tolist()),
                version_spans=spans if length > 1 and versions[0] != versions[1] else spans[:1],
                finish_reason="stop",
                kept_tokens=tuple(token for ids in kept for token in ids),
                kept_counts=tuple(len(ids) for ids in kept),
            ),
            t_started=0.0,
            t_finished=0.0,
        )

    def _reward(self, rollout: Trajectory) -> float | None:
        reward = float(self.random.integers(0, 4)) / 4
        request = rollout.request
        failed = request.group_id == 9 or (request.group_id % 5 == 0 and request.sample_index == 2)
        return None if failed else reward

    def _writer(self, generator: int) -> StreamWriter:
        return StreamWriter(
            self.store,
            layout.trajectories(generator),
            TRAJECTORY,
            f"generate-{generator}",
            vocab_size=self.vocab_size,
            group_size=GROUP_SIZE,
        )


def score_rows(first_row_id: int, rewards: list[float | None]) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "row_id": first_row_id + i,
                "reward": reward,
                "components": "{}",
                "status": "error" if reward is None else "ok",
                "error": "broken" if reward is None else None,
                "verifier_version": "1",
                "seconds": 0.25,
                "t_scored": 0.5,
            }
            for i, reward in enumerate(rewards)
        ],
        schema=SCORE,
    )


def rewrite(run: TrainedRun, path: str, schema: pa.Schema, change: Callable[[pa.Table], pa.Table]) -> None:
    """Writes a stream again, part by part, every checksum as it should be; `change` gets each part's rows."""
    store = run.store
    parts = list(iter(StreamReader(store, path, schema).next, None))
    tables = [change(part.table) for part in parts]
    shutil.rmtree(run.folder / path)
    writer = StreamWriter(store, path, schema, "rewritten", vocab_size=parts[0].record.vocab_size)
    kept = ("tokens", "min_policy_version", "max_policy_version", "incarnation", "last_group_id")
    for part, table in zip(parts, tables, strict=True):
        writer.write(table, **{name: getattr(part.record, name) for name in kept})


def flip_a_bit(file: Path) -> None:
    """Flips a bit in the middle of the file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def with_value(table: pa.Table, row: int, name: str, value: Any) -> pa.Table:
    """`table` with another value in one row of one column."""
    values = table[name].to_pylist()
    values[row] = value
    field = table.schema.field(name)
    return table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))
