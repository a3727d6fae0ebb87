"""Selecting from stored runs and cutting the selected groups into batches."""

from collections.abc import Callable
from typing import Any

import pytest
from support.replay.mixed_run import as_mixture
from support.replay.trained_run import GENERATORS, GROUPS_PER_STEP, LAST_STEP, TrainedRun, score_rows

from configs.requests import ReplayRequest, Selection
from configs.stored import AnnotatorPools
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
        (
            Selection(where="reward_max > reward_min and reward_mean < 0.5"),
            lambda row: row["reward_max"] > row["reward_min"] and row["reward_mean"] < 0.5,
        ),
        (Selection(where="step % 2 = 0 or place = 0"), lambda row: row["step"] % 2 == 0 or row["place"] == 0),
        (Selection(where="t > 0 -- always"), lambda row: True),
        (
            Selection(from_step=3, to_step=9, max_staleness=1, where="tokens > 12"),
            lambda row: 3 <= row["step"] <= 9 and row["staleness"] <= 1 and row["tokens"] > 12,
        ),
    ],
)
def test_a_selection_keeps_the_matching_groups_in_order(
    run: SourceRun, selection: Selection, condition: Callable[[dict[str, Any]], bool]
) -> None:
    rows = select(run, selection).tolist()
    assert rows == expected(run, condition) != []


def test_the_groups_of_a_source_can_be_selected(trained: TrainedRun) -> None:
    run = SourceRun(as_mixture(trained).store)
    rows = select(run, Selection(where="source = 'words'")).tolist()
    assert rows == expected(run, lambda row: row["group_id"] % 2 == 1) != []
    assert {group.source for group in run.read(rows)} == {"words"}


def test_stale_groups_can_be_selected_too(run: SourceRun) -> None:
    rows = select(run, Selection(dropped=True)).tolist()
    assert {run.groups["outcome"][row].as_py() for row in rows} == {"trained", "stale"}
    assert rows == expected(run, lambda row: True, outcomes="trained stale")
    assert set(run.groups["outcome"].to_pylist()) == {"trained", "stale", "error", "rolled_back"}


def rescored(run: TrainedRun, store: MemoryStore, rewards: Callable[[int], list[float | None]]) -> SourceRun:
    """The run with scores by another reward; `rewards` gives those of a part from its number of rows."""
    parts = SourceRun(run.store).parts
    for generator in range(GENERATORS):
        writer = StreamWriter(store, layout.annotations("scores/other", generator, 0, 1), SCORE, "score-0")
        for record in parts.records[generator]:
            writer.write(score_rows(record.first_row_id, rewards(record.rows)), tokens=record.tokens)
    return SourceRun(run.store, scores=Scores(store=store, pools=AnnotatorPools({"scores/other": 1})))


def test_a_group_whose_new_scores_failed_is_left_out(
    run: SourceRun, unchanged: TrainedRun, memory_store: MemoryStore
) -> None:
    # The first group of each part gets a single reward.
    other = rescored(unchanged, memory_store, lambda rows: [None if 0 < row < 4 else 0.5 for row in range(rows)])
    first_rows = {(g, record.first_row_id) for g in range(GENERATORS) for record in run.parts.records[g]}
    table = other.groups.to_pylist()
    trained = expected(run, lambda row: True)
    kept = [row for row in trained if (table[row]["generator"], table[row]["first_row_id"]) not in first_rows]
    assert select(other, Selection()).tolist() == kept
    assert 0 < len(kept) < len(trained)


def test_a_run_without_any_reward_has_nothing_to_train_on(unchanged: TrainedRun, memory_store: MemoryStore) -> None:
    with pytest.raises(ReplayError):
        select(rescored(unchanged, memory_store, lambda rows: [None] * rows), Selection())


def test_a_condition_can_not_read_files_or_other_tables(run: SourceRun) -> None:
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
        *("rewrad_mean > 1", "reward_mean >", "reward_mean > 0) union select 1 --"),
        *("true; drop table groups", "sum(tokens) > 1", "outcome", ""),
    ],
)
def test_an_invalid_condition_is_refused_in_one_line(run: SourceRun, where: str) -> None:
    with pytest.raises(ReplayError) as raised:
        select(run, Selection.model_construct(where=where))
    assert (raised.value.file, raised.value.read.startswith(f"{where!r}: ")) == ("--where", True)
    assert "\n" not in str(raised.value)


def test_an_empty_selection_is_refused_with_the_filter_that_emptied_it(run: SourceRun) -> None:
    for selection, condition in (
        (Selection(from_step=13), "step >= 13"),
        (Selection.model_construct(max_staleness=-1), "staleness <= -1"),
        (Selection(where="reward_mean > 7"), "reward_mean > 7"),
        (Selection(where="generator = 9", dropped=True), "generator = 9"),
    ):
        with pytest.raises(ReplayError) as raised:
            select(run, selection)
        assert condition in str(raised.value.expected)


def batches_of(
    sources: list[SourceRun], *, groups_per_step: int = GROUPS_PER_STEP, seed: int = 0, **values: Any
) -> list[list[tuple[int, int]]]:
    request = ReplayRequest(sources=["stored"], run_id="replay", job="train", **values)
    return plan(sources, request, groups_per_step=groups_per_step, seed=seed)


def flat(batches: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    return [group for batch in batches for group in batch]


def test_whole_steps_in_stored_order_are_the_original_batches(run: SourceRun) -> None:
    expected = [[(0, row) for row in run.batch(step).tolist()] for step in range(3, LAST_STEP + 1)]
    assert batches_of([run], from_step=3) == expected


def test_groups_that_fill_no_batch_are_left_out(run: SourceRun) -> None:
    rows = select(run, Selection(where="generator = 0")).tolist()
    batches = batches_of([run], where="generator = 0", groups_per_step=5)
    assert {len(batch) for batch in batches} == {5}
    assert [row for _, row in flat(batches)] == rows[: len(rows) // 5 * 5] != rows
    assert len(batches_of([run], where="generator = 0", groups_per_step=len(rows))) == 1
    with pytest.raises(ReplayError):
        batches_of([run], where="generator = 0", groups_per_step=len(rows) + 1)


def test_the_seed_decides_the_shuffled_order(run: SourceRun) -> None:
    stored = flat(batches_of([run]))
    first, again, other = (flat(batches_of([run], order="shuffled", seed=seed)) for seed in (5, 5, 6))
    assert first == again
    assert sorted(first) == sorted(other) == stored
    assert stored not in (first, other)
    assert first != other


@pytest.mark.parametrize(("order", "arranged"), [("stored", list), ("shuffled", sorted)])
def test_several_sources_are_concatenated_or_shuffled(
    run: SourceRun, order: str, arranged: Callable[[list[Any]], list[Any]]
) -> None:
    rows = select(run, Selection()).tolist()
    groups = flat(batches_of([run, run], order=order, groups_per_step=1, seed=1))
    assert arranged(groups) == [(source, row) for source in (0, 1) for row in rows]
    batches = batches_of([run, run], order=order, groups_per_step=5, seed=1)
    assert flat(batches) == groups[: len(groups) // 5 * 5], "batches contain groups of both sources"
