"""A stage's metrics: its pace, the reward curve of its status record, and the stream with its older parts merged."""

from collections.abc import Iterable
from itertools import pairwise

from support.stored_run.metrics import metric_rows
from support.stores.dict_store import DictStore

from millrace.runtime.metrics import (
    MOST_POINTS,
    RECENT_STEPS,
    MetricsWriter,
    Pace,
    RewardCurve,
    extend_curve,
    extend_recent,
)
from storage import layout
from storage.schema import METRIC
from storage.streams.merged import EVERY
from storage.streams.stream import StreamReader, StreamWriter


def test_the_first_step_only_starts_the_clock() -> None:
    ends = iter((100.0, 103.0, 108.0))
    pace = Pace(lambda: next(ends))
    assert pace.step(50) == {}, "it waited for the pipeline to fill"
    assert pace.step(60) == {"step_seconds": 3.0, "tokens_per_second": 20.0}
    assert pace.step(100) == {"step_seconds": 4.0, "tokens_per_second": 20.0}


def curve_of(versions: Iterable[int], curve: RewardCurve) -> RewardCurve:
    for version in versions:
        curve = extend_curve(curve, version, 0.01 * version)
        assert len(curve) <= MOST_POINTS
    return curve


def test_a_curve_of_rewards_has_few_points_spread_over_the_whole_run() -> None:
    assert curve_of(range(1, 4), []) == [[1, 0.01], [2, 0.02], [3, 0.03]]
    versions = [version for version, _ in curve_of(range(1, 1002), [])]
    assert len(versions) > MOST_POINTS / 2
    assert (versions[0], versions[-1]) == (16, 1001)
    assert {after - before for before, after in pairwise(versions[:-1])} == {16}


def test_a_curve_goes_back_with_the_trainer() -> None:
    curve = extend_curve(curve_of(range(1, 9), []), 5, 1.0)
    assert curve == [[1, 0.01], [2, 0.02], [3, 0.03], [4, 0.04], [5, 1.0]]


def test_a_record_has_the_values_of_the_last_ten_steps_without_those_that_are_not_finite() -> None:
    recent: dict[str, list[float]] = {}
    for step in range(12):
        loss = float("nan") if step == 11 else 1.0
        recent = extend_recent(recent, {"reward_mean": float(step), "loss": loss, "grad_norm": 1.0})
    rewards = [float(step) for step in range(12 - RECENT_STEPS, 12)]
    assert recent == {"reward_mean": rewards, "loss": [1.0] * RECENT_STEPS}


def test_a_stage_merges_its_older_metrics() -> None:
    store, path = DictStore(), layout.metrics("train", 0)
    earlier = StreamWriter(store, path, METRIC, "train-0")
    for version in range(EVERY - 1):
        earlier.write(metric_rows({"loss": 0.5}, t=0.0, incarnation=0, policy_version=version), tokens=0)
    writer = MetricsWriter(store, "train", 0)
    # More rows than fit into one part: the second call commits the first.
    for version in (EVERY, EVERY + 1):
        writer.log(incarnation=1, policy_version=version, **{f"metric_{number}": 0.0 for number in range(4000)})
    writer.close()
    (merged,) = StreamReader(store, layout.merged_metrics("train", 0), METRIC).readable()
    assert merged.table.num_rows == EVERY - 1 + 4000
    last = list(iter(StreamReader(store, path, METRIC).next_record, None))[-1]
    assert (last.part, last.incarnation, last.min_policy_version) == (EVERY, 1, EVERY + 1)
