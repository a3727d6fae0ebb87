"""The course of a reward from a few parts: the right points, and how little is read for them."""

from collections.abc import Sequence

import numpy as np
import pytest
from support.stored_run.metrics import metric_rows
from support.stores.dict_store import DictStore
from support.stores.slow_store import SlowStore
from support.streams.rows import part_files

from dashboard.read.curves import RewardCurve
from storage import layout
from storage.schema import METRIC
from storage.streams.stream import StreamWriter

PATH = layout.metrics("train", 0)
MOST = 32


def parts_read(store: SlowStore) -> int:
    return sum("/seg/" in path for path in store.gets)


def write(store: DictStore, versions: Sequence[int], incarnation: int = 0, of: float = 0.01) -> None:
    stream = StreamWriter(store, PATH, METRIC, "train-0")
    for version in versions:
        values = {"loss": 1.0, "reward_mean": of * version}
        rows = metric_rows(values, t=1.0, incarnation=incarnation, policy_version=version)
        stream.write(rows, tokens=0)


def read(curve: RewardCurve) -> tuple[list[float], list[float]]:
    assert curve.read_new(lambda: False)
    return curve.points["policy_version"].tolist(), curve.points["reward"].tolist()


def test_a_long_run_is_read_at_a_few_parts_spread_over_all_of_it() -> None:
    store = SlowStore()
    write(store, range(1, 301))
    versions, rewards = read(RewardCurve(store))
    assert MOST / 2 - 1 <= len(versions) <= MOST
    assert parts_read(store) <= MOST
    assert versions[0] < 64
    assert versions[-1] > 300 - 64
    assert np.ptp(np.diff(versions)) == 0
    assert rewards == pytest.approx([0.01 * version for version in versions])


def test_a_run_that_grows_is_read_on_and_looks_as_if_read_at_once() -> None:
    store = SlowStore()
    growing = RewardCurve(store)
    for first in range(1, 121, 20):
        write(store, range(first, first + 20))
        read(growing)
    assert read(growing) == read(RewardCurve(store))
    earlier = parts_read(store)
    read(growing)
    assert parts_read(store) == earlier


def test_what_a_restarted_trainer_made_again_replaces_what_was_there() -> None:
    store = DictStore()
    write(store, range(1, 9))
    write(store, range(5, 8), incarnation=1, of=0.5)
    versions, rewards = read(RewardCurve(store))
    assert versions == [1, 2, 3, 4, 5, 6, 7]
    assert rewards == pytest.approx([0.01, 0.02, 0.03, 0.04, 2.5, 3.0, 3.5])


def test_a_part_that_is_damaged_is_a_point_that_is_missing() -> None:
    store = DictStore()
    write(store, range(1, 6))
    part = part_files(store, PATH)[0]
    store.objects[part] = store.objects[part][:-8] + b"\xff" * 8
    assert len(read(RewardCurve(store))[0]) == 4
