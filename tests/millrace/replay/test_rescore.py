"""Scores by another reward, compared with those that a run trained with."""

import pytest
from support.replay.trained_run import GENERATORS, TrainedRun, score_rows

from millrace.replay.rescore import CHANGED, compare_scores
from millrace.replay.source_run import SourceRun
from storage import layout
from storage.schema import SCORE
from storage.stores.memory import MemoryStore
from storage.streams.stream import StreamWriter


def test_rows_are_counted_by_both_rewards(unchanged: TrainedRun, memory_store: MemoryStore) -> None:
    run = SourceRun(unchanged.store)
    pairs: list[tuple[float | None, float | None]] = []
    for generator in range(GENERATORS):
        writer = StreamWriter(memory_store, layout.scores("other", generator, 0, 1), SCORE, "score-0")
        rewards = run.parts.rewards(generator).tolist()
        for record in run.parts.records[generator]:
            rows = range(record.first_row_id, record.first_row_id + record.rows)
            old = [None if rewards[row] != rewards[row] else rewards[row] for row in rows]
            new = [None if row % 3 == 0 else row / 4 for row in range(record.rows)]
            writer.write(score_rows(record.first_row_id, new), tokens=record.tokens)
            pairs += zip(old, new, strict=True)
    totals, changed = compare_scores(run, memory_store, "missing", 1)
    assert totals["total"]["rows"] == changed.num_rows == 0
    assert totals["total"]["agreement"] is totals["total"]["shift"] is None
    totals, changed = compare_scores(run, memory_store, "other", 1)
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
    assert sum(summary["rows"] for summary in totals["by_source"].values()) == len(pairs)
    assert (totals["old_reward"], totals["new_reward"], totals["unread"]) == ("exact_match", "other", [])
    assert changed.schema == CHANGED
    assert changed.num_rows == len(pairs) - counts["agreed"]
    assert list(zip(changed["old_reward"].to_pylist(), changed["new_reward"].to_pylist(), strict=True)) == [
        (old, new) for old, new in pairs if old != new
    ]
