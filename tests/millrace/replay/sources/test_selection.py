"""Selecting from a stored run: each condition leaves what it says, and one that leaves nothing is named."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.replay.trained_run import GENERATORS, LAST_STEP, SCORERS, TrainedRun, score_rows

from configs.replay import Selection
from millrace.errors import ReplayError
from millrace.replay.sources.parts import Scores
from millrace.replay.sources.selection import select
from millrace.replay.sources.source_run import SourceRun
from storage import layout
from storage.schema import SCORE
from storage.stores.memory import MemoryStore
from storage.streams.stream import StreamWriter, write_removed


@pytest.fixture(scope="module")
def run(unchanged: TrainedRun) -> SourceRun:
    return SourceRun(unchanged.store)


def expected(run: SourceRun, condition: Callable[[dict[str, Any]], bool], outcomes: str = "trained") -> list[int]:
    return [
        number
        for number, row in enumerate(run.groups.to_pylist())
        if row["outcome"] in outcomes.split() and row["verified"] >= 2 and condition(row)
    ]


@pytest.mark.parametrize(
    ("selection", "condition"),
    [
        (Selection(), lambda row: True),
        (Selection(from_step=4), lambda row: row["step"] >= 4),
        (Selection(to_step=4), lambda row: row["step"] <= 4),
        (Selection(from_step=4, to_step=4), lambda row: row["step"] == 4),
        (Selection(max_staleness=0), lambda row: row["staleness"] == 0),
        (Selection(where="generator = 1"), lambda row: row["generator"] == 1),
        (Selection(where="reward_max > reward_min and reward_mean < 0.5"), lambda row: _spread(row) and _low(row)),
        (Selection(where="step % 2 = 0 or place = 0"), lambda row: row["step"] % 2 == 0 or row["place"] == 0),
        (Selection(where="t > 0 -- always"), lambda row: True),
        (
            Selection(from_step=3, to_step=9, max_staleness=1, where="tokens > 12"),
            lambda row: 3 <= row["step"] <= 9 and row["staleness"] <= 1 and row["tokens"] > 12,
        ),
    ],
)
def test_a_selection_leaves_the_groups_it_describes_in_their_order(
    run: SourceRun, selection: Selection, condition: Callable[[dict[str, Any]], bool]
) -> None:
    found = select(run, selection).tolist()
    assert found == expected(run, condition)
    assert found, "witness: something was left"


def _spread(row: dict[str, Any]) -> bool:
    return bool(row["reward_max"] > row["reward_min"])


def _low(row: dict[str, Any]) -> bool:
    return bool(row["reward_mean"] < 0.5)


def test_whole_steps_are_the_batches_of_the_run(run: SourceRun) -> None:
    found = select(run, Selection(from_step=2, to_step=8))
    assert found.tolist() == np.concatenate([run.batch(step) for step in range(2, 9)]).tolist()


def test_what_was_dropped_as_stale_is_taken_on_request_and_nothing_else_that_was_dropped(run: SourceRun) -> None:
    found = select(run, Selection(dropped=True)).tolist()
    outcomes = {run.groups["outcome"][row].as_py() for row in found}
    assert outcomes == {"trained", "stale"}
    assert found == expected(run, lambda row: True, outcomes="trained stale")
    assert set(run.groups["outcome"].to_pylist()) == {"trained", "stale", "error", "rolled_back"}, "witness"


def test_a_group_whose_new_scores_failed_is_left_out(unchanged: TrainedRun, memory_store: MemoryStore) -> None:
    own = SourceRun(unchanged.store)
    for generator in range(GENERATORS):
        writer = StreamWriter(memory_store, layout.scores("other", generator, 0, 1), SCORE, "score-0")
        for record in own.parts.records[generator]:
            # The first group of each part gets a single reward.
            rewards = [None if 0 < row < 4 else 0.5 for row in range(record.rows)]
            writer.write(score_rows(record.first_row_id, rewards), tokens=record.tokens)
    rescored = SourceRun(unchanged.store, scores=Scores(store=memory_store, reward="other"))
    first_rows = {(g, record.first_row_id) for g in range(GENERATORS) for record in own.parts.records[g]}
    rows = rescored.groups.to_pylist()
    kept = [
        row
        for row in expected(own, lambda row: True)
        if (rows[row]["generator"], rows[row]["first_row_id"]) not in first_rows
    ]
    assert select(rescored, Selection()).tolist() == kept
    assert 0 < len(kept) < len(expected(own, lambda row: True)), "witness"


@pytest.mark.parametrize(
    ("selection", "sentence"),
    [
        (Selection(from_step=13), f"no such group is of steps 13 to 12; its steps are 1 to {LAST_STEP}"),
        (Selection(from_step=20, to_step=30), f"no such group is of steps 20 to 30; its steps are 1 to {LAST_STEP}"),
        (Selection.model_construct(max_staleness=-1), "no such group has a staleness of at most -1"),
        (Selection(where="reward_mean > 7"), "no such group fulfils 'reward_mean > 7'"),
        (Selection(where="generator = 9", dropped=True), "no such group fulfils 'generator = 9'"),
    ],
)
def test_the_part_of_a_selection_that_leaves_nothing_is_named(
    run: SourceRun, selection: Selection, sentence: str
) -> None:
    with pytest.raises(ReplayError) as raised:
        select(run, selection)
    assert str(raised.value) == f"{run.url}: {sentence}"


def test_a_run_without_a_single_reward_has_nothing_to_train_on(
    unchanged: TrainedRun, memory_store: MemoryStore
) -> None:
    own = SourceRun(unchanged.store)
    for generator in range(GENERATORS):
        for scorer in range(SCORERS):
            writer = StreamWriter(memory_store, layout.scores("none", generator, scorer, SCORERS), SCORE, "score")
            for record in own.parts.records[generator][scorer::SCORERS]:
                writer.write(score_rows(record.first_row_id, [None] * record.rows), tokens=record.tokens)
    scores = Scores(store=memory_store, reward="none", num_scorers=SCORERS)
    with pytest.raises(ReplayError, match="no group that it took as trained has two rewards or more"):
        select(SourceRun(unchanged.store, scores=scores), Selection())


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (
            "rewrad_mean > 1",
            'Referenced column "rewrad_mean" not found in FROM clause! Candidate bindings: "reward_mean"',
        ),
        ("reward_mean >", 'syntax error at or near ">"'),
        ("reward_mean > 0) union select 1 --", "syntax error"),
        ("true; drop table groups", "Cannot have any modifiers in the expression list"),
        ("sum(tokens) > 1", "WHERE clause cannot contain aggregates"),
        ("outcome", "Could not convert string"),
        ("", "SELECT clause without selection list"),
    ],
)
def test_a_condition_that_is_none_is_refused_with_what_the_database_says_of_it(
    run: SourceRun, where: str, reason: str
) -> None:
    with pytest.raises(ReplayError) as raised:
        select(run, Selection.model_construct(where=where))
    sentence = str(raised.value)
    assert sentence.startswith(f"where: {where!r}: ")
    assert reason in sentence
    assert sentence.endswith("reward_max")
    assert "\n" not in sentence


def test_a_condition_reaches_no_file_and_no_other_table(run: SourceRun) -> None:
    file = next((run.store.local_path(layout.RUN) or pytest.fail("a local run")).parent.glob("run.json"))
    assert file.read_text(), "witness: the file could be read"
    for where in (
        f"tokens > (select count(*) from read_text('{file}'))",
        "step in (select step from groups)",
        "step in (select step from numbered)",
    ):
        with pytest.raises(ReplayError, match=r"disabled by configuration|does not exist"):
            select(run, Selection(where=where))


def test_what_gc_removed_is_refused_before_anything_is_trained(trained: TrainedRun) -> None:
    write_removed(trained.store, layout.trajectories(0), parts=1, why="test")
    with pytest.raises(ReplayError, match="millrace gc removed the first 1 parts of streams/trajectories/0"):
        select(SourceRun(trained.store), Selection())
