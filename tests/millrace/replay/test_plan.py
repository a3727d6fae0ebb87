"""The batches of a replay: the original ones where that is asked for, and stated proportions wherever one stops."""

import math
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.trained_run import GROUPS_PER_STEP, LAST_STEP, TrainedRun

from millrace.replay.plan import Order, plan
from millrace.replay.selection import Selection, select
from millrace.replay.stored import StoredRun

T = TypeVar("T")


@pytest.fixture(scope="module")
def run(unchanged: TrainedRun) -> StoredRun:
    return StoredRun(unchanged.store)


def one_source(
    run: StoredRun,
    rows: np.ndarray,
    *,
    groups_per_step: int = GROUPS_PER_STEP,
    order: Order = "stored",
    seed: int = 0,
    max_steps: int | None = None,
) -> list[list[int]]:
    batches = plan([(run, rows, 2.0)], groups_per_step=groups_per_step, order=order, seed=seed, max_steps=max_steps)
    assert {source for batch in batches for source, _ in batch} <= {0}
    return [[row for _, row in batch] for batch in batches]


def flat(batches: list[list[T]]) -> list[T]:
    return [group for batch in batches for group in batch]


def test_whole_steps_in_stored_order_are_the_original_batches(run: StoredRun) -> None:
    rows = select(run, Selection(from_step=3))
    assert one_source(run, rows) == [run.batch(step).tolist() for step in range(3, LAST_STEP + 1)]


def test_other_sizes_cut_the_same_groups_anew_and_leave_the_rest_out(run: StoredRun) -> None:
    rows = select(run, Selection(where="generator = 0"))
    batches = one_source(run, rows, groups_per_step=5)
    assert {len(batch) for batch in batches} == {5}
    assert flat(batches) == rows[: len(rows) // 5 * 5].tolist()
    assert len(rows) % 5, "witness: some were left over"


def test_what_does_not_fill_a_batch_makes_no_plan(run: StoredRun) -> None:
    assert one_source(run, np.arange(3), groups_per_step=4) == []
    assert one_source(run, np.arange(4), groups_per_step=4) == [[0, 1, 2, 3]]


def test_a_plan_ends_with_the_steps_allowed(run: StoredRun) -> None:
    rows = np.arange(20)
    assert one_source(run, rows, max_steps=2) == one_source(run, rows)[:2]
    assert len(one_source(run, rows, max_steps=99)) == 5


def test_a_seed_shuffles_the_same_groups_in_the_same_way_and_another_in_another(run: StoredRun) -> None:
    rows = np.arange(100, 140)
    first, again, other = (flat(one_source(run, rows, order="shuffled", seed=seed)) for seed in (5, 5, 6))
    assert first == again
    assert sorted(first) == sorted(other) == rows.tolist()
    assert first != other
    assert first != rows.tolist()


@given(
    shares=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    sizes=st.lists(st.integers(0, 120), min_size=6, max_size=6),
    order=st.sampled_from(["stored", "shuffled"]),
)
def test_the_proportions_hold_wherever_one_stops_until_the_source_whose_turn_it_is_runs_out(
    run: StoredRun, shares: list[int], sizes: list[int], order: Order
) -> None:
    total = sum(shares)
    sources = [(run, np.arange(size), share / 10) for size, share in zip(sizes, shares, strict=False)]
    groups = flat(plan(sources, groups_per_step=1, order=order, seed=1, max_steps=None))
    counts = [0] * len(shares)
    for number, (source, _) in enumerate(groups, start=1):
        counts[source] += 1
        for share, count in zip(shares, counts, strict=True):
            # As whole numbers, for a share of a third has no end.
            assert share * number // total <= count <= math.ceil(share * number / total)
    for source, count in enumerate(counts):
        rows = [row for of, row in groups if of == source]
        assert len(set(rows)) == count
        if order == "stored":
            assert rows == list(range(count))
    exhausted = [count == size for count, size in zip(counts, sizes, strict=False)]
    assert any(exhausted), "it ends only where a source has no more"


def test_a_small_share_is_spread_over_the_plan(run: StoredRun) -> None:
    sources = [(run, np.arange(90), 9.0), (run, np.arange(10), 1.0)]
    batches = plan(sources, groups_per_step=10, order="stored", seed=0, max_steps=None)
    assert len(batches) == 10
    assert all(sum(source == 1 for source, _ in batch) == 1 for batch in batches)
