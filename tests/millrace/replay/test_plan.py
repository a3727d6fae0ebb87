"""The batches of a replay: the original ones if that is requested; several sources one after the other, or shuffled."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from support.replay.trained_run import GROUPS_PER_STEP, LAST_STEP, TrainedRun

from configs.replay import ReplayRequest
from millrace.errors import ReplayError
from millrace.replay.plan import plan
from millrace.replay.sources.selection import select
from millrace.replay.sources.source_run import SourceRun

T = TypeVar("T")


@pytest.fixture(scope="module")
def run(unchanged: TrainedRun) -> SourceRun:
    return SourceRun(unchanged.store)


def request(**values: Any) -> ReplayRequest:
    return ReplayRequest(sources=["stored"], run_id="replay", job="train", **values)


def one_source(
    run: SourceRun, asked: ReplayRequest, *, groups_per_step: int = GROUPS_PER_STEP, seed: int = 0
) -> list[list[int]]:
    batches = plan([run], asked, groups_per_step=groups_per_step, seed=seed)
    assert {source for batch in batches for source, _ in batch} == {0}
    return [[row for _, row in batch] for batch in batches]


def flat(batches: list[list[T]]) -> list[T]:
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
    with pytest.raises(ReplayError, match=f"{groups} stored groups are chosen .* expected at least one whole batch"):
        one_source(run, request(), groups_per_step=groups + 1)


def test_a_seed_shuffles_the_same_groups_in_the_same_way_and_another_in_another(run: SourceRun) -> None:
    rows = select(run, request())
    first, again, other = (flat(one_source(run, request(order="shuffled"), seed=seed)) for seed in (5, 5, 6))
    assert first == again
    assert sorted(first) == sorted(other) == rows.tolist()
    assert first != other
    assert first != rows.tolist()
    assert first == np.random.default_rng(5).permutation(rows).tolist(), "as replays of one source always were"


@pytest.mark.parametrize(("order", "arranged"), [("stored", list), ("shuffled", sorted)])
def test_several_sources_are_trained_completely_one_after_the_other_or_shuffled(
    run: SourceRun, order: str, arranged: Callable[[list[Any]], list[Any]]
) -> None:
    rows = select(run, request()).tolist()
    groups = flat(plan([run, run], request(order=order), groups_per_step=1, seed=1))
    assert arranged(groups) == [(source, row) for source in (0, 1) for row in rows]
    both = plan([run, run], request(order=order), groups_per_step=5, seed=1)
    assert flat(both) == groups[: len(groups) // 5 * 5], "batches are cut across the sources"
