"""Selecting from stored runs and cutting the selected groups into batches."""

from collections.abc import Callable
from typing import Any

import pytest
from support.replay.trained_run import GENERATORS, GROUPS_PER_STEP, LAST_STEP, SCORERS, TrainedRun, score_rows

from configs.requests import ReplayRequest, Selection
from millrace.errors import ReplayError
from millrace.replay.parts import Scores
from millrace.replay.selection import plan, select
from millrace.replay.source_run import SourceRun
from storage import layout
from storage.schema import SCORE
from storage.stores.memory import MemoryStore
from storage.streams.stream import StreamWriter


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
    with pytest.raises(ReplayError):
        select(SourceRun(unchanged.store, scores=scores), Selection())


def test_a_condition_reaches_no_file_and_no_other_table(run: SourceRun) -> None:
    file = next((run.store.local_path(layout.RUN) or pytest.fail("a local run")).parent.glob("run.json"))
    assert file.read_text(), "witness: the file could be read"
    for where in (
        f"tokens > (select count(*) from read_text('{file}'))",
        "step in (select step from groups)",
        "step in (select step from numbered)",
    ):
        with pytest.raises(ReplayError):
            select(run, Selection(where=where))


@pytest.mark.parametrize(
    "where",
    [
        "rewrad_mean > 1",
        "reward_mean >",
        "reward_mean > 0) union select 1 --",
        "true; drop table groups",
        "sum(tokens) > 1",
        "outcome",
        "",
    ],
)
def test_what_is_no_condition_is_refused_in_one_line(run: SourceRun, where: str) -> None:
    with pytest.raises(ReplayError) as raised:
        select(run, Selection.model_construct(where=where))
    assert str(raised.value).startswith(f"where: {where!r}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "selection",
    [
        Selection(from_step=13),
        Selection.model_construct(max_staleness=-1),
        Selection(where="reward_mean > 7"),
        Selection(where="generator = 9", dropped=True),
    ],
)
def test_a_selection_that_leaves_nothing_is_refused(run: SourceRun, selection: Selection) -> None:
    with pytest.raises(ReplayError):
        select(run, selection)


def request(**values: Any) -> ReplayRequest:
    return ReplayRequest(sources=["stored"], run_id="replay", job="train", **values)


def one_source(
    run: SourceRun, requested: ReplayRequest, *, groups_per_step: int = GROUPS_PER_STEP, seed: int = 0
) -> list[list[int]]:
    batches = plan([run], requested, groups_per_step=groups_per_step, seed=seed)
    assert {source for batch in batches for source, _ in batch} == {0}
    return [[row for _, row in batch] for batch in batches]


def flat(batches: list[list[Any]]) -> list[Any]:
    return [group for batch in batches for group in batch]


def test_whole_steps_in_stored_order_are_the_original_batches(run: SourceRun) -> None:
    expected = [run.batch(step).tolist() for step in range(3, LAST_STEP + 1)]
    assert one_source(run, request(from_step=3)) == expected


def test_other_sizes_cut_the_same_groups_anew_and_leave_the_rest_out(run: SourceRun) -> None:
    rows = select(run, request(where="generator = 0"))
    batches = one_source(run, request(where="generator = 0"), groups_per_step=5)
    assert {len(batch) for batch in batches} == {5}
    assert flat(batches) == rows[: len(rows) // 5 * 5].tolist()
    assert len(rows) % 5, "witness: some were left over"


def test_what_does_not_fill_a_batch_is_refused(run: SourceRun) -> None:
    groups = len(select(run, request()))
    assert len(one_source(run, request(), groups_per_step=groups)) == 1
    with pytest.raises(ReplayError):
        one_source(run, request(), groups_per_step=groups + 1)


def test_a_seed_shuffles_the_same_groups_in_the_same_way_and_another_in_another(run: SourceRun) -> None:
    rows = select(run, request())
    first, again, other = (flat(one_source(run, request(order="shuffled"), seed=seed)) for seed in (5, 5, 6))
    assert first == again
    assert sorted(first) == sorted(other) == rows.tolist()
    assert first != other
    assert first != rows.tolist()


@pytest.mark.parametrize(("order", "arranged"), [("stored", list), ("shuffled", sorted)])
def test_several_sources_are_trained_completely_one_after_the_other_or_shuffled(
    run: SourceRun, order: str, arranged: Callable[[list[Any]], list[Any]]
) -> None:
    rows = select(run, request()).tolist()
    groups = flat(plan([run, run], request(order=order), groups_per_step=1, seed=1))
    assert arranged(groups) == [(source, row) for source in (0, 1) for row in rows]
    both = plan([run, run], request(order=order), groups_per_step=5, seed=1)
    assert flat(both) == groups[: len(groups) // 5 * 5], "batches are cut across the sources"
