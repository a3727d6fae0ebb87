"""Scores by another reward, compared with those that a run trained with."""

import pytest
from support.replay.mixed_run import as_mixture
from support.replay.trained_run import GENERATORS, TrainedRun, score_rows
from support.stores.dict_store import DictStore

from millrace.replay.rescore import CHANGED, compare_scores
from millrace.replay.source_run import SourceRun
from millrace.runs.record import create_run
from storage import layout
from storage.schema import SCORE
from storage.stores.base import Store
from storage.stores.memory import MemoryStore
from storage.streams.stream import StreamWriter


def create_replay(store: Store, run: SourceRun, reward: str) -> None:
    """A replay of a run, with one scorer of this reward."""
    sources = {name: {"scoring": {"reward": reward}} for name in run.config["sources"]}
    create_run(store, "again", {**run.config, "sources": sources, "scoring": {"reward": reward, "replicas": 1}})


def test_rows_are_counted_by_both_rewards(unchanged: TrainedRun, memory_store: MemoryStore) -> None:
    run = SourceRun(unchanged.store)
    create_replay(memory_store, run, "other")
    pairs: list[tuple[float | None, float | None]] = []
    for generator in range(GENERATORS):
        writer = StreamWriter(memory_store, layout.annotations("scores/other", generator, 0, 1), SCORE, "score-0")
        rewards = run.parts.rewards(generator).tolist()
        for record in run.parts.records[generator]:
            rows = range(record.first_row_id, record.first_row_id + record.rows)
            old = [None if rewards[row] != rewards[row] else rewards[row] for row in rows]
            new = [None if row % 3 == 0 else row / 4 for row in range(record.rows)]
            writer.write(score_rows(record.first_row_id, new), tokens=record.tokens)
            pairs += zip(old, new, strict=True)
    unscored = DictStore()
    create_replay(unscored, run, "missing")
    totals, changed = compare_scores(run, unscored)
    assert totals["total"]["rows"] == changed.num_rows == 0
    assert totals["total"]["agreement"] is totals["total"]["shift"] is None
    totals, changed = compare_scores(run, memory_store)
    both = [(old, new) for old, new in pairs if old is not None and new is not None]
    counts = {
        "rows": len(pairs),
        "agreed": sum(old == new for old, new in pairs),
        "rose": sum(new > old for old, new in both),
        "fell": sum(new < old for old, new in both),
        "old_failed": sum(old is None for old, _ in pairs),
        "new_failed": sum(new is None for _, new in pairs),
    }
    assert {name: totals["total"][name] for name in counts} == counts
    assert totals["total"]["agreement"] == counts["agreed"] / len(pairs)
    assert totals["total"]["shift"] == pytest.approx(sum(new - old for old, new in both) / len(both))
    assert {name: summary["rows"] for name, summary in totals["by_source"].items()} == {"test": len(pairs)}
    assert (totals["old_reward"], totals["new_reward"], totals["unread"]) == ("exact_match", "other", [])
    assert changed.schema == CHANGED
    assert changed.num_rows == len(pairs) - counts["agreed"]
    assert list(zip(changed["old_reward"].to_pylist(), changed["new_reward"].to_pylist(), strict=True)) == [
        (old, new) for old, new in pairs if old != new
    ]


def test_rows_of_a_mixture_are_counted_by_source(trained: TrainedRun, memory_store: MemoryStore) -> None:
    run = SourceRun(as_mixture(trained).store)
    create_replay(memory_store, run, "other")
    rows = {"sums": 0, "words": 0}
    for generator in range(GENERATORS):
        writer = StreamWriter(memory_store, layout.annotations("scores/other", generator, 0, 1), SCORE, "score-0")
        for part, record in enumerate(run.parts.records[generator]):
            sources = run.parts.trajectories(generator, part, ["source"]).table["source"].to_pylist()
            rewards = [2.0 if source == "sums" else None for source in sources]
            writer.write(score_rows(record.first_row_id, rewards), tokens=record.tokens)
            for source in sources:
                rows[source] += 1
    totals, changed = compare_scores(run, memory_store)
    assert {name: summary["rows"] for name, summary in totals["by_source"].items()} == rows
    failed = {name: summary["new_failed"] for name, summary in totals["by_source"].items()}
    assert failed == {"sums": 0, "words": rows["words"]}
    assert (totals["old_reward"], totals["new_reward"]) == ("exact_match, math", "other")
    assert set(changed["source"].to_pylist()) == {"sums", "words"}
