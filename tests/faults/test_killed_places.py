"""A writer is killed at every place that can leave a half-made file, and started again after each kill.

put.before · put.mid · put.after   of   a record · a file of rows or of a checkpoint · a snapshot
"""

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stages.failpoints import Failpoints
from support.streams.numbered import PATH, open_reader, take_numbers
from support.streams.writer_process import acknowledged, running_writer

from storage import layout
from storage.checkpoints import load_file, read_latest
from storage.stores.base import Store
from storage.stores.local import LocalStore
from storage.streams.log import LogReader

SEEDS = (0,)
MOMENTS = ("before", "mid", "after")
LARGEST_PART = 4
ROUNDS = pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.faults)])


def kills(how: str, files: list[str], rounds: int, seed: int, folder: Path) -> Iterator[tuple[str, int]]:
    """Runs and kills one writer after the other on `folder / "store"`: where it was, what it had acknowledged."""
    chooser = random.Random(f"{seed} {how}")
    for turn in range(rounds):
        places = [f"put.{moment}:{file}" for file in files for moment in MOMENTS]
        chooser.shuffle(places)
        for place in places:
            # A snapshot is written once in 64 records. Of the others the first is met, too: a fence, a first file.
            nth = 1 if place.endswith(layout.HEAD) else chooser.choice([1, 2, chooser.randint(3, 30)])
            where = f"seed {seed}, turn {turn}, {place} {nth}"
            failpoints = Failpoints(folder / f"fired-{turn}" / place.replace("/", "|"), f"w {place} {nth} kill")
            with running_writer(folder / "store", "w", how, failpoints) as writer:
                said = acknowledged(writer)
                assert writer.wait() == -signal.SIGKILL, where
            assert failpoints.missed() == [], where
            yield where, said


@pytest.mark.slow
@ROUNDS
@pytest.mark.parametrize("how", ["parts", "grouped"])
def test_a_writer_killed_at_every_place_in_turn_loses_nothing_and_repeats_nothing(
    how: str, rounds: int, seed: int, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / "store")
    reader = open_reader(store)
    numbers: list[int] = []
    files = [f"{PATH}/log/*", f"{PATH}/seg/*", f"{PATH}/{layout.HEAD}"]
    killed = 0
    for where, said in kills(how, files, rounds, seed, tmp_path):
        killed += 1
        before = len(numbers)
        numbers += take_numbers(reader)
        assert numbers == list(range(len(numbers))), where
        assert said <= len(numbers) <= max(before, said) + LARGEST_PART, f"{where}: {said} rows were acknowledged"
    print(f"{how}: {killed} kills, {len(numbers)} rows, 0 lost, 0 twice")
    assert killed == rounds * len(files) * len(MOMENTS)
    assert take_numbers(open_reader(store)) == numbers


@pytest.mark.slow
@ROUNDS
def test_a_trainer_killed_at_every_place_in_turn_keeps_each_checkpoint_whole(
    rounds: int, seed: int, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / "store")
    files = [f"{layout.CHECKPOINTS}/log/*", f"{layout.CHECKPOINTS}/data/*", f"{layout.CHECKPOINTS}/{layout.HEAD}"]
    steps = killed = 0
    for where, said in kills("checkpoints", files, rounds, seed, tmp_path):
        killed += 1
        before, steps = steps, whole_checkpoints(store, where)
        assert said <= steps <= max(before, said) + 1, f"{where}: {said} checkpoints were acknowledged"
    print(f"{killed} kills, {steps} checkpoints, 0 lost, 0 twice")
    assert killed == rounds * len(files) * len(MOMENTS)


def whole_checkpoints(store: Store, where: str) -> int:
    """How many checkpoints there are: each step once, in order, the latest one with its own files and state."""
    records = iter(LogReader(store, layout.CHECKPOINTS).next, None)
    steps = [record.body["step"] for record in records if record.kind == "checkpoint"]
    assert steps == list(range(len(steps))), where
    latest = read_latest(store)
    if latest is None:
        assert steps == [], where
        return 0
    assert (latest.step, latest.state) == (steps[-1], {"step": steps[-1]}), where
    for name in ("model", "optimizer"):
        assert load_file(store, latest.files[name]).startswith(b"%d %s " % (latest.step, name.encode())), where
    return len(steps)
