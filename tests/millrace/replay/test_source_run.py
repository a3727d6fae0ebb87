"""A stored run gives back what its trainer consumed: groups, their order, log-probabilities and advantages."""

import random
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.replay.trained_run import (
    GENERATORS,
    GROUPS_PER_STEP,
    KILLED_AT,
    LAST_STEP,
    MAX_STALENESS,
    TrainedRun,
    flip_a_bit,
    rewrite,
    score_rows,
    with_value,
)

from millrace.errors import ReplayError
from millrace.replay.parts import Scores
from millrace.replay.source_run import SourceRun
from millrace.rollouts.scored_group import ScoredGroup
from storage import layout
from storage.errors import PartCorrupt, StreamCorrupt
from storage.schema import CONSUMED, SCORE, TRAINER_LOGPROBS
from storage.stores.base import Store
from storage.stores.memory import MemoryStore
from storage.streams.stream import StreamWriter, read_part, stream_head, write_removed


def contents(group: ScoredGroup) -> tuple[object, ...]:
    lists = (group.prompt_tokens, group.response_tokens, group.rollout_logprobs, group.loss_mask, group.kept_counts)
    return (
        group.group_id,
        group.generator,
        group.first_row_id,
        group.rewards,
        group.temperature,
        *([one.tolist() for one in values] for values in lists),
    )


def rows_of(run: SourceRun, steps: Sequence[int]) -> list[int]:
    return [row for step in steps for row in run.batch(step).tolist()]


def test_every_step_has_its_batch_and_nothing_that_was_rolled_back(
    unchanged: TrainedRun,
) -> None:
    run = SourceRun(unchanged.store)
    assert run.steps == list(range(1, LAST_STEP + 1))
    assert run.config["training"]["groups_per_step"] == GROUPS_PER_STEP
    for step, told in unchanged.told.items():
        rows = run.batch(step)
        found = [contents(group) for group in run.read(rows.tolist())]
        assert found == [contents(group) for group in told.groups], f"step {step}"
        assert run.groups["place"].take(rows).to_pylist() == list(range(GROUPS_PER_STEP))
        assert set(run.groups["incarnation"].take(rows).to_pylist()) == {0 if step <= 6 else 1}
    told_rows = stream_head(unchanged.store, layout.CONSUMED).rows
    assert told_rows > sum(run.groups["rollouts"].to_pylist()), f"witness: steps 7 to {KILLED_AT} were told twice"


def test_groups_are_described_by_their_trajectories_and_rewards(unchanged: TrainedRun) -> None:
    run = SourceRun(unchanged.store)
    failed = 0
    for step, told in unchanged.told.items():
        for row, group in zip(run.groups.take(run.batch(step)).to_pylist(), told.groups, strict=True):
            known = [reward for reward in group.rewards if reward is not None]
            failed += len(group.rewards) - len(known)
            assert (row["step"], row["generator"], row["outcome"]) == (step, group.generator, "trained")
            assert (row["first_row_id"], row["rollouts"]) == (group.first_row_id, len(group.rewards))
            assert (row["verified"], row["reward_mean"]) == (len(known), pytest.approx(sum(known) / len(known)))
            assert (row["reward_min"], row["reward_max"]) == (min(known), max(known))
            assert row["tokens"] == group.amount().tokens == row["length_mean"] * row["rollouts"]
            assert row["staleness"] == group.staleness(step - 1) <= MAX_STALENESS
            assert (row["min_policy_version"], row["max_policy_version"]) == (
                group.min_policy_version,
                group.max_policy_version,
            )
    assert failed > 0, "witness: some rewards were missing"
    no_reward = run.groups.filter(pa.array(run.groups["verified"].to_numpy() == 0))
    assert no_reward.num_rows > 0
    assert no_reward["reward_mean"].null_count == no_reward.num_rows


def test_log_probabilities_and_advantages_come_back_bit_for_bit(
    unchanged: TrainedRun,
) -> None:
    run = SourceRun(unchanged.store)
    for step, told in unchanged.told.items():
        assert [one.tobytes() for one in run.trainer_logprobs(step)] == [one.tobytes() for one in told.logprobs]
        assert run.advantages(step) == [float(np.float32(sample.advantage)) for sample in told.samples]
        taken = [run.rewards(row) for row in run.batch(step).tolist()]
        assert taken == [group.rewards for group in told.groups]
    assert not run.logprobs_stored(LAST_STEP + 1)
    with pytest.raises(ReplayError):
        run.trainer_logprobs(LAST_STEP + 1)


def test_groups_are_read_in_any_order_and_each_part_once(
    unchanged: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def counting(store: Store, path: str, *rest: Any) -> pa.Table:
        reads.append(path.rpartition("/")[0])
        return read_part(store, path, *rest)

    monkeypatch.setattr("millrace.replay.parts.read_part", counting)
    run = SourceRun(unchanged.store)
    told = {contents(group)[0]: contents(group) for one in unchanged.told.values() for group in one.groups}
    rows = rows_of(run, run.steps)
    seed = 7
    random.Random(seed).shuffle(rows)
    for row, group in zip(rows, run.read(rows), strict=True):
        assert group.group_id == run.groups["group_id"][row].as_py(), f"seed {seed}"
        assert contents(group) == told[group.group_id], f"seed {seed}"
    generators = run.groups["generator"].to_numpy()[rows]
    first_rows = run.groups["first_row_id"].to_numpy()[rows]
    touched = sum(len(set(run.parts.parts_of(g, first_rows[generators == g]).tolist())) for g in range(GENERATORS))
    assert reads.count(layout.TRAJECTORIES) == touched < len(rows)


def test_only_checkpoints_with_their_files_count(trained: TrainedRun) -> None:
    assert list(SourceRun(trained.store).checkpoints) == [3, 6, 9, 12]
    shutil.rmtree(next((trained.folder / "checkpoints/data").glob("00000009-*")))
    run = SourceRun(trained.store)
    assert list(run.checkpoints) == [3, 6, 12]
    assert run.checkpoint(6).step == 6
    with pytest.raises(ReplayError):
        run.checkpoint(9)


def test_other_scores_replace_the_run_s_own(unchanged: TrainedRun, memory_store: MemoryStore) -> None:
    own = SourceRun(unchanged.store)
    for generator in range(GENERATORS):
        writer = StreamWriter(memory_store, layout.scores("other", generator, 0, 1), SCORE, "score-0")
        for record in own.parts.records[generator]:
            rewards = [None if row % 3 == 0 else row / 4 for row in range(record.rows)]
            writer.write(score_rows(record.first_row_id, rewards), tokens=record.tokens)
    run = SourceRun(unchanged.store, scores=Scores(store=memory_store, reward="other"))
    rows = rows_of(run, [5, 12])
    table = run.groups.take(rows).to_pylist()
    for row, group, before in zip(table, run.read(rows), own.read(rows), strict=True):
        known = [reward for reward in group.rewards if reward is not None]
        assert group.rewards != before.rewards
        assert [one.tolist() for one in group.response_tokens] == [one.tolist() for one in before.response_tokens]
        assert (row["verified"], row["reward_max"]) == (len(known), max(known))
    assert run.rewards(rows[0]) == own.rewards(rows[0]), "what the trainer took stays what it was"


def test_trajectories_without_scores_are_refused_in_a_sentence(unchanged: TrainedRun) -> None:
    run = SourceRun(unchanged.store, scores=Scores(store=unchanged.store, reward="other"))
    with pytest.raises(ReplayError):
        next(run.read(rows_of(run, [1])))


def test_what_gc_removed_is_refused_with_the_first_step_that_is_whole(trained: TrainedRun) -> None:
    run = SourceRun(trained.store)
    run.check_stored(np.array(rows_of(run, run.steps)))
    write_removed(trained.store, layout.trajectories(1), parts=3, why="test")
    gone = [row for row in range(run.groups.num_rows) if _part_of(run, 1, row) in (0, 1, 2)]
    last = max(run.groups["step"][row].as_py() for row in gone)
    assert 1 <= last < LAST_STEP
    with pytest.raises(ReplayError):
        run.check_stored(np.array(rows_of(run, [last])))
    run.check_stored(np.array(rows_of(run, range(last + 1, LAST_STEP + 1))))


def _part_of(run: SourceRun, generator: int, row: int) -> int:
    if run.groups["generator"][row].as_py() != generator:
        return -1
    return int(run.parts.parts_of(generator, np.array([run.groups["first_row_id"][row].as_py()]))[0])


def test_a_flipped_bit_in_a_part_is_named_when_the_part_is_read(trained: TrainedRun) -> None:
    run = SourceRun(trained.store)
    file = f"{layout.trajectories(1)}/{run.parts.records[1][0].file}"
    flip_a_bit(trained.folder / file)
    with pytest.raises(PartCorrupt):
        list(run.read(rows_of(run, run.steps)))
    file = next((trained.folder / layout.CONSUMED / "seg").iterdir())
    flip_a_bit(file)
    with pytest.raises(PartCorrupt):
        SourceRun(trained.store)


def test_a_group_that_is_not_the_one_the_trainer_took_is_taken_for_damage(trained: TrainedRun) -> None:
    def renumber(rows: pa.Table) -> pa.Table:
        place = rows.schema.get_field_index("group_id")
        return rows.set_column(place, rows.schema.field(place), pa.array(rows["group_id"].to_numpy() + 100))

    rewrite(trained, layout.CONSUMED, CONSUMED, renumber)
    run = SourceRun(trained.store)
    with pytest.raises(StreamCorrupt):
        next(run.read(rows_of(run, [1])))


def test_log_probabilities_of_other_trajectories_are_taken_for_damage(trained: TrainedRun) -> None:
    rewrite(
        trained,
        layout.TRAINER_LOGPROBS,
        TRAINER_LOGPROBS,
        lambda rows: with_value(rows, rows.num_rows - 1, "trajectory_row_id", 10_000),
    )
    with pytest.raises(StreamCorrupt):
        SourceRun(trained.store).trainer_logprobs(12)


def test_a_run_without_trajectories_is_refused_when_they_are_read(
    trained: TrainedRun,
) -> None:
    shutil.rmtree(trained.folder / layout.trajectories(1))
    run = SourceRun(trained.store)
    assert run.steps[-1] == LAST_STEP
    for ask in (lambda rows: list(run.read(rows)), lambda rows: run.check_stored(np.array(rows))):
        with pytest.raises(ReplayError):
            ask(rows_of(run, run.steps))
