"""Verifying a run whose stored data is no longer what it was: the step, the group and the file are named."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from support.replay.trained_run import (
    GROUP_SIZE,
    SCORERS,
    TrainedRun,
    flip_a_bit,
    rewrite,
    with_value,
)
from support.replay.verdicts import parted

from millrace.replay.parts import data_records
from millrace.replay.source_run import SourceRun
from millrace.replay.verify import verify
from millrace.rollouts.scored_group import ScoredGroup
from storage import layout
from storage.schema import CONSUMED, SCORE, TRAINER_LOGPROBS, TRAJECTORY


def of_step(run: TrainedRun, step: int, place: int = 1) -> tuple[ScoredGroup, str]:
    """A group that the step trained, and the stream that holds its scores."""
    group = run.told[step].groups[place]
    part = SourceRun(run.store).parts.parts_of(group.generator, np.array([group.first_row_id]))[0]
    return group, layout.scores("exact_match", group.generator, int(part) % SCORERS, SCORERS)


def change_row(run: TrainedRun, path: str, schema: pa.Schema, row_id: int, **values: Any) -> None:
    """Values of the row of that row_id, with all checksums as they should be."""
    changed = 0

    def change(table: pa.Table) -> pa.Table:
        nonlocal changed
        row = pc.index(table["row_id"], row_id).as_py()
        changed += row >= 0
        for name, value in values.items() if row >= 0 else ():
            table = with_value(table, row, name, value)
        return table

    rewrite(run, path, schema, change)
    assert changed == 1, "witness: the value was changed"


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 12])
def test_one_changed_reward_is_found_at_exactly_its_step(trained: TrainedRun, step: int) -> None:
    group, scores = of_step(trained, step)
    index = group.verified[-1]
    before = group.rewards[index]
    assert before is not None
    change_row(trained, scores, SCORE, group.first_row_id + index, reward=before + 0.125)
    verdict = verify(trained.store)
    assert parted(verdict) == (
        step,
        "data",
        f"group {group.group_id}, member {index} (generator {group.generator}, row {group.first_row_id + index}): "
        f"the stored reward is {before + 0.125}, the trainer used {before}",
    )
    assert len(verdict.passed) == step - 1
    assert verdict.sentence.endswith("(cause: the stored scores are not those that the run trained with)")


def test_rewards_that_moved_alike_are_found_though_advantages_stay(trained: TrainedRun) -> None:
    group, scores = of_step(trained, 4)
    assert len(group.verified) == GROUP_SIZE

    def shift(table: pa.Table) -> pa.Table:
        for index, reward in enumerate(group.rewards):
            row = pc.index(table["row_id"], group.first_row_id + index).as_py()
            table = table if row < 0 else with_value(table, row, "reward", (reward or 0.0) + 1.0)
        return table

    rewrite(trained, scores, SCORE, shift)
    step, what, sentence = parted(verify(trained.store))
    assert (step, what) == (4, "data")
    assert f"group {group.group_id}, member 0" in sentence


def test_advantages_that_do_not_follow_from_the_rewards_are_found_at_their_step(trained: TrainedRun) -> None:
    group, _ = of_step(trained, 2)
    index = group.verified[0]

    def change(table: pa.Table) -> pa.Table:
        is_it = [
            (generator, row_id) == (group.generator, group.first_row_id + index)
            for generator, row_id in zip(
                table["generator"].to_pylist(), table["trajectory_row_id"].to_pylist(), strict=True
            )
        ]
        return with_value(table, is_it.index(True), "advantage", 0.75) if any(is_it) else table

    rewrite(trained, layout.CONSUMED, CONSUMED, change)
    step, what, sentence = parted(verify(trained.store))
    assert (step, what) == (2, "data")
    assert f"group {group.group_id}, member {index}" in sentence
    assert sentence.endswith("the trainer used 0.75")


def test_changed_tokens_are_found_at_their_step(trained: TrainedRun) -> None:
    group, _ = of_step(trained, 7)
    tokens = group.response_tokens[2].tolist()
    path = layout.trajectories(group.generator)
    changed = [tokens[0] ^ 1, *tokens[1:]]
    # A token that could not have been drawn would be refused as damage.
    num_kept = [*group.kept_counts[2], 0][0]
    kept = [
        token ^ 1 if i < num_kept and token == tokens[0] else token
        for i, token in enumerate(group.kept_tokens[2].tolist())
    ]
    change_row(trained, path, TRAJECTORY, group.first_row_id + 2, response_tokens=changed, kept_tokens=kept)
    verdict = verify(trained.store)
    step, what, sentence = parted(verdict)
    assert (step, what) == (7, "logprobs")
    assert f"differs on 1 of {len(trained.told[7].samples)} trajectories" in sentence
    assert f"on group {group.group_id}, member 2 (" in sentence
    assert verdict.difference is not None
    assert verdict.difference.causes == ("the stored trajectories are not those that the run trained on",)


def damaged_files(run: TrainedRun) -> dict[str, tuple[Path, int]]:
    """By name: a stored file, and the step at which damage to it is met."""
    stored = SourceRun(run.store)
    group, scores = of_step(run, 8)
    part = int(stored.parts.parts_of(group.generator, np.array([group.first_row_id]))[0])
    trajectories = stored.parts.records[group.generator][part]
    in_part = range(trajectories.first_row_id, trajectories.first_row_id + trajectories.rows)
    # The part may have been begun by a step before.
    first = min(
        step
        for step, told in run.told.items()
        if any(one.generator == group.generator and one.first_row_id in in_part for one in told.groups)
    )
    score = data_records(run.store, scores, SCORE)[part // SCORERS]
    logprobs = data_records(run.store, layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS)[-1]
    return {
        "trajectories": (run.folder / layout.trajectories(group.generator) / trajectories.file, first),
        "scores": (run.folder / scores / score.file, first),
        "model": (run.folder / stored.checkpoints[9].files["model.safetensors"].path, 9),
        "logprobs": (run.folder / layout.TRAINER_LOGPROBS / logprobs.file, logprobs.min_policy_version),
        "consumed": (next((run.folder / layout.CONSUMED / "seg").iterdir()), 1),
        "record": (run.folder / layout.trajectories(0) / layout.record(2), 1),
    }


@pytest.mark.parametrize("name", ["trajectories", "scores", "model", "consumed", "record", "logprobs"])
def test_a_flipped_bit_is_damage_of_the_step_that_needs_the_file(trained: TrainedRun, name: str) -> None:
    file, at_step = damaged_files(trained)[name]
    flip_a_bit(file)
    verdict = verify(trained.store)
    step, what, sentence = parted(verdict)
    assert (step, what, len(verdict.passed)) == (at_step, "damage", at_step - 1)
    assert str(file.relative_to(trained.folder)) in sentence
    assert verdict.sentence == f"step {at_step} can't be trained again: {sentence}"


def test_a_run_that_masked_tokens_is_reproduced_with_the_same_masks(unchanged: TrainedRun) -> None:
    run = SourceRun(unchanged.store)
    masked = [sum(sum(group.masked_tokens) for group in told.groups) for told in unchanged.told.values()]
    assert sum(masked) > 0, "witness: tokens were masked"
    stale = [group for told in unchanged.told.values() for group in told.groups if group.trained != group.verified]
    assert stale, "witness: all tokens of some members were"
    for step, told in unchanged.told.items():
        for found, group in zip(run.read(run.batch(step).tolist()), told.groups, strict=True):
            assert found.masked_tokens == group.masked_tokens
            assert [mask.tolist() for mask in found.loss_mask] == [mask.tolist() for mask in group.loss_mask]


def test_a_count_of_masked_tokens_that_no_bound_explains_is_damage_of_that_step(trained: TrainedRun) -> None:
    step, group = next(
        (step, group)
        for step, told in trained.told.items()
        for group in told.groups
        if any(count >= 2 and not group.is_masked(i) for i, count in enumerate(group.masked_tokens))
    )
    index = next(i for i, count in enumerate(group.masked_tokens) if count >= 2 and not group.is_masked(i))

    def change(table: pa.Table) -> pa.Table:
        keys = zip(table["generator"].to_pylist(), table["trajectory_row_id"].to_pylist(), strict=True)
        is_it = [key == (group.generator, group.first_row_id + index) for key in keys]
        return with_value(table, is_it.index(True), "masked_tokens", 1) if any(is_it) else table

    rewrite(trained, layout.CONSUMED, CONSUMED, change)
    found_at, what, sentence = parted(verify(trained.store))
    assert (found_at, what) == (step, "damage")
    assert f"tokens of the members of group {group.group_id}" in sentence
