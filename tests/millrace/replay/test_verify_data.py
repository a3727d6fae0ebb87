"""Verification of a run whose stored data has changed: the step, the group and the file are named."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from support.replay.trained_run import GROUP_SIZE, SCORERS, TrainedRun, flip_a_bit, rewrite, with_value
from support.replay.verdicts import parted

from millrace.replay.parts import data_records
from millrace.replay.source_run import SourceRun
from millrace.replay.verify import verify
from millrace.rollouts.scored_group import ScoredGroup
from storage import layout
from storage.schema import CONSUMED, SCORE, TRAINER_LOGPROBS, TRAJECTORY


def of_step(run: TrainedRun, step: int, place: int = 1) -> tuple[ScoredGroup, str]:
    """A group that the step trained, and the stream that holds its scores."""
    group = run.steps[step].groups[place]
    part = SourceRun(run.store).parts.parts_of(group.generator, np.array([group.first_row_id]))[0]
    return group, layout.annotations("scores/exact_match", group.generator, int(part) % SCORERS, SCORERS)


def change_row(run: TrainedRun, path: str, schema: pa.Schema, row_id: int, **values: Any) -> None:
    """Changes values of the row with that row_id; all checksums are right."""
    changed = 0

    def change(table: pa.Table) -> pa.Table:
        nonlocal changed
        row = pc.index(table["row_id"], row_id).as_py()
        changed += row >= 0
        for name, value in values.items() if row >= 0 else ():
            table = with_value(table, row, name, value)
        return table

    rewrite(run, path, schema, change)
    assert changed == 1


def test_shifted_rewards_are_found_though_advantages_stay(trained: TrainedRun) -> None:
    group, scores = of_step(trained, 4)
    assert len(group.verified) == GROUP_SIZE

    def shift(table: pa.Table) -> pa.Table:
        for index, reward in enumerate(group.rewards):
            row = pc.index(table["row_id"], group.first_row_id + index).as_py()
            table = table if row < 0 else with_value(table, row, "reward", (reward or 0.0) + 1.0)
        return table

    rewrite(trained, scores, SCORE, shift)
    verdict = verify(trained.store)
    step, what, sentence = parted(verdict)
    assert (step, what, len(verdict.passed)) == (4, "data", 3)
    assert sentence == (
        f"group {group.group_id}, member 0 (generator {group.generator}, row {group.first_row_id}): "
        f"the stored reward is {(group.rewards[0] or 0.0) + 1.0}, the trainer used {group.rewards[0]}"
    )
    assert verdict.sentence.endswith("(cause: the stored scores are not those that the run trained with)")


def change_consumed(run: TrainedRun, group: ScoredGroup, index: int, name: str, value: Any) -> None:
    """Changes a value of a member of the group in `consumed`."""

    def change(table: pa.Table) -> pa.Table:
        keys = list(zip(table["generator"].to_pylist(), table["trajectory_row_id"].to_pylist(), strict=True))
        key = (group.generator, group.first_row_id + index)
        return with_value(table, keys.index(key), name, value) if key in keys else table

    rewrite(run, layout.CONSUMED, CONSUMED, change)


def test_changed_advantages_are_found_at_their_step(trained: TrainedRun) -> None:
    group, _ = of_step(trained, 2)
    index = group.verified[0]
    change_consumed(trained, group, index, "advantage", 0.75)
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
    assert f"differs on 1 of {len(trained.steps[7].samples)} trajectories" in sentence
    assert f"on group {group.group_id}, member 2 (" in sentence
    assert verdict.difference is not None
    assert verdict.difference.causes == ("the stored trajectories are not those that the run trained on",)


def damaged_files(run: TrainedRun) -> dict[str, tuple[Path, int]]:
    """Name → a stored file, and the step that reads it first."""
    stored = SourceRun(run.store)
    group, scores = of_step(run, 8)
    part = int(stored.parts.parts_of(group.generator, np.array([group.first_row_id]))[0])
    trajectories = stored.parts.records[group.generator][part]
    in_part = range(trajectories.first_row_id, trajectories.first_row_id + trajectories.rows)
    # An earlier step may have read the part.
    first = min(
        step
        for step, trained in run.steps.items()
        if any(other.generator == group.generator and other.first_row_id in in_part for other in trained.groups)
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


def test_an_impossible_count_of_masked_tokens_is_damage(trained: TrainedRun) -> None:
    step, group, index = next(
        (step, group, index)
        for step, trained_step in trained.steps.items()
        for group in trained_step.groups
        for index, count in enumerate(group.masked_tokens)
        if count >= 2 and not group.is_masked(index)
    )
    change_consumed(trained, group, index, "masked_tokens", 1)
    damaged_step, what, sentence = parted(verify(trained.store))
    assert (damaged_step, what) == (step, "damage")
    assert f"tokens of the members of group {group.group_id}" in sentence
