"""A stored run has the groups that its trainer consumed, their order, log-probabilities and advantages."""

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
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
    rewrite,
    score_rows,
    with_value,
)

from configs.stored import AnnotatorPools
from millrace.errors import ReplayError
from millrace.replay.parts import Scores
from millrace.replay.source_run import SourceRun
from millrace.rollouts.scored_group import ScoredGroup
from storage import layout
from storage.errors import StreamCorrupt
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
        group.masked_tokens,
        *([values.tolist() for values in members] for members in lists),
    )


def rows_of(run: SourceRun, steps: Sequence[int]) -> list[int]:
    return [row for step in steps for row in run.batch(step).tolist()]


def test_every_step_has_its_batch_without_rolled_back_groups(unchanged: TrainedRun) -> None:
    run = SourceRun(unchanged.store)
    assert run.steps == list(range(1, LAST_STEP + 1))
    for step, trained in unchanged.steps.items():
        rows = run.batch(step)
        groups = [contents(group) for group in run.read(rows.tolist())]
        assert groups == [contents(group) for group in trained.groups], f"step {step}"
        assert run.groups["place"].take(rows).to_pylist() == list(range(GROUPS_PER_STEP))
        assert set(run.groups["incarnation"].take(rows).to_pylist()) == {0 if step <= 6 else 1}
    stored_rows = stream_head(unchanged.store, layout.CONSUMED).rows
    assert stored_rows > sum(run.groups["rollouts"].to_pylist()), f"steps 7 to {KILLED_AT} were trained twice"
    masked = [group for trained in unchanged.steps.values() for group in trained.groups if any(group.masked_tokens)]
    assert any(group.trained != group.verified for group in masked), "some members are masked whole"


def test_the_table_describes_each_group(unchanged: TrainedRun) -> None:
    run = SourceRun(unchanged.store)
    failed = 0
    for step, trained in unchanged.steps.items():
        for row, group in zip(run.groups.take(run.batch(step)).to_pylist(), trained.groups, strict=True):
            rewards = [reward for reward in group.rewards if reward is not None]
            failed += len(group.rewards) - len(rewards)
            assert row["length_mean"] == row["tokens"] / row["rollouts"]
            assert row["staleness"] <= MAX_STALENESS
            assert (
                row.items()
                >= {
                    "step": step,
                    "generator": group.generator,
                    "outcome": "trained",
                    "first_row_id": group.first_row_id,
                    "rollouts": len(group.rewards),
                    "verified": len(rewards),
                    "reward_mean": pytest.approx(sum(rewards) / len(rewards)),
                    "reward_min": min(rewards),
                    "reward_max": max(rewards),
                    "tokens": group.amount().tokens,
                    "staleness": group.staleness(step - 1),
                    "min_policy_version": group.min_policy_version,
                    "max_policy_version": group.max_policy_version,
                }.items()
            )
    assert failed > 0
    no_reward = run.groups.filter(pa.array(run.groups["verified"].to_numpy() == 0))
    assert no_reward["reward_mean"].null_count == no_reward.num_rows > 0


def test_log_probabilities_advantages_and_rewards_are_read_exactly(unchanged: TrainedRun) -> None:
    run = SourceRun(unchanged.store)
    for step, trained in unchanged.steps.items():
        stored, original = run.trainer_logprobs(step), trained.logprobs
        assert [values.tobytes() for values in stored] == [values.tobytes() for values in original]
        assert run.advantages(step) == [float(np.float32(sample.advantage)) for sample in trained.samples]
        rewards = [run.rewards(row) for row in run.batch(step).tolist()]
        assert rewards == [group.rewards for group in trained.groups]
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
    groups = {group.group_id: group for trained in unchanged.steps.values() for group in trained.groups}
    rows = rows_of(run, run.steps)
    random.Random(7).shuffle(rows)
    for row, group in zip(rows, run.read(rows), strict=True):
        assert group.group_id == run.groups["group_id"][row].as_py()
        assert contents(group) == contents(groups[group.group_id])
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
    with pytest.raises(ReplayError) as raised:
        run.checkpoint(9)
    assert raised.value.expected == "one of 3, 6, 12"


def test_other_scores_replace_those_of_the_run(unchanged: TrainedRun, memory_store: MemoryStore) -> None:
    original = SourceRun(unchanged.store)
    for generator in range(GENERATORS):
        writer = StreamWriter(memory_store, layout.annotations("scores/other", generator, 0, 1), SCORE, "score-0")
        for record in original.parts.records[generator]:
            rewards = [None if row % 3 == 0 else row / 4 for row in range(record.rows)]
            writer.write(score_rows(record.first_row_id, rewards), tokens=record.tokens)
    run = SourceRun(unchanged.store, scores=Scores(store=memory_store, pools=AnnotatorPools({"scores/other": 1})))
    rows = rows_of(run, [5, 12])
    for row, group, scored in zip(run.groups.take(rows).to_pylist(), run.read(rows), original.read(rows), strict=True):
        rewards = [reward for reward in group.rewards if reward is not None]
        assert group.rewards != scored.rewards
        assert contents(replace(group, rewards=scored.rewards)) == contents(scored)
        assert (row["verified"], row["reward_max"]) == (len(rewards), max(rewards))
    assert run.rewards(rows[0]) == original.rewards(rows[0]), "the trainer's rewards stay"
    unscored = SourceRun(
        unchanged.store, scores=Scores(store=unchanged.store, pools=AnnotatorPools({"scores/other": 1}))
    )
    with pytest.raises(ReplayError):
        next(unscored.read(rows))


def test_removed_parts_are_refused_with_the_first_whole_step(trained: TrainedRun) -> None:
    run = SourceRun(trained.store)
    run.check_stored(np.array(rows_of(run, run.steps)))
    write_removed(trained.store, layout.trajectories(1), parts=3, why="test")
    generators, first_rows = (run.groups[name].to_numpy() for name in ("generator", "first_row_id"))
    gone = np.flatnonzero((generators == 1) & (run.parts.parts_of(1, first_rows) < 3))
    last = run.groups["step"][int(gone[-1])].as_py()
    assert 1 <= last < LAST_STEP
    with pytest.raises(ReplayError) as raised:
        run.check_stored(np.array(rows_of(run, [last])))
    assert f"step {last + 1}" in str(raised.value.expected)
    run.check_stored(np.array(rows_of(run, range(last + 1, LAST_STEP + 1))))


def test_rows_that_contradict_each_other_are_damage(trained: TrainedRun) -> None:
    def change_last(rows: pa.Table) -> pa.Table:
        return with_value(rows, rows.num_rows - 1, "trajectory_row_id", 10_000)

    def renumber(rows: pa.Table) -> pa.Table:
        place = rows.schema.get_field_index("group_id")
        return rows.set_column(place, rows.schema.field(place), pa.array(rows["group_id"].to_numpy() + 100))

    rewrite(trained, layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS, change_last)
    with pytest.raises(StreamCorrupt):
        SourceRun(trained.store).trainer_logprobs(12)
    rewrite(trained, layout.CONSUMED, CONSUMED, renumber)
    run = SourceRun(trained.store)
    with pytest.raises(StreamCorrupt):
        next(run.read(rows_of(run, [1])))


def test_a_run_without_trajectories_is_refused_when_they_are_read(trained: TrainedRun) -> None:
    shutil.rmtree(trained.folder / layout.trajectories(1))
    run = SourceRun(trained.store)
    rows = rows_of(run, run.steps)
    with pytest.raises(ReplayError):
        list(run.read(rows))
    with pytest.raises(ReplayError):
        run.check_stored(np.array(rows))
