"""Lineage: the policy versions that are still ancestors of the current one after trainers were killed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stores.dict_store import DictStore
from support.stores.memory import unused_name

from millrace.rollouts.lineage import Lineage, part_of_step, surviving
from storage.checkpoints import CheckpointWriter
from storage.stores.memory import MemoryStore
from storage.streams.log import LogWriter


class StartedTrainer:
    """A trainer as far as its lineage goes: it starts from the latest checkpoint, and may commit another."""

    def __init__(self, store: MemoryStore) -> None:
        self.checkpoints = CheckpointWriter(store)
        self.lineage = Lineage.after(self.checkpoints.latest, self.checkpoints.incarnation)

    def checkpoint(self, policy_version: int) -> None:
        self.checkpoints.commit(policy_version, {}, {"lineage": self.lineage.to_json()})


def last_held(lineage: Lineage, incarnation: int) -> int:
    """Newest version of `incarnation` that exists, −1 if none does."""
    return max((version for version in range(100) if lineage.holds(incarnation, version)), default=-1)


def test_a_first_trainer_has_only_its_versions(memory_store: MemoryStore) -> None:
    lineage = StartedTrainer(memory_store).lineage
    assert lineage.holds(0, 0)
    assert lineage.holds(0, 25)
    assert not lineage.holds(1, 0)


@pytest.mark.parametrize(
    ("checkpoints", "last"),
    [([20], [20, 99]), ([None], [0, 99]), ([20, None, None], [20, 20, 20, 99]), ([10, 15], [10, 15, 99])],
    ids=["checkpoint", "died before any checkpoint", "died before their checkpoints", "two checkpoints"],
)
def test_each_earlier_trainer_lasts_to_its_last_checkpoint(
    memory_store: MemoryStore, checkpoints: list[int | None], last: list[int]
) -> None:
    for version in checkpoints:
        trainer = StartedTrainer(memory_store)
        if version is not None:
            trainer.checkpoint(version)
    lineage = StartedTrainer(memory_store).lineage
    assert [last_held(lineage, incarnation) for incarnation in range(len(last))] == last


@given(st.lists(st.sampled_from(["step", "step", "checkpoint", "killed"]), max_size=40))
def test_a_lineage_holds_exactly_the_ancestors_of_the_policy(story: list[str]) -> None:
    store = MemoryStore(unused_name())
    trainer = StartedTrainer(store)
    incarnation = version = 0
    # Every version under each incarnation's name that the present policy, and the last checkpoint's, grew out of.
    ancestors = saved = {(0, 0)}
    for event in story:
        if event == "step":
            version += 1
            ancestors = ancestors | {(incarnation, version)}
        elif event == "checkpoint":
            trainer.checkpoint(version)
            saved = ancestors
        else:
            trainer = StartedTrainer(store)
            incarnation += 1
            version = max(v for _, v in saved)
            # The successor offers the version it starts from under its own name.
            saved = ancestors = saved | {(incarnation, version)}
    assert all(trainer.lineage.holds(*ancestor) for ancestor in ancestors)
    for earlier in range(incarnation):
        assert last_held(trainer.lineage, earlier) == max(v for i, v in ancestors if i == earlier)


TRAINERS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=6)


@given(TRAINERS)
def test_rows_up_to_each_rollback_survive(stories: list[tuple[int, int]]) -> None:
    """Each trainer goes back by up to some versions, and makes at least one."""
    incarnations, versions, lasting = [], [], {}
    newest = 0
    for incarnation, (back, made) in enumerate(stories):
        newest = max(0, newest - back)
        lasting = {version: by for version, by in lasting.items() if version <= newest}
        for _ in range(made):
            newest += 1
            incarnations.append(incarnation)
            versions.append(newest)
            lasting[newest] = incarnation
    columns = np.array(incarnations, dtype=np.int32), np.array(versions, dtype=np.int64)
    kept = surviving(*columns)
    assert dict(zip(columns[1][kept].tolist(), columns[0][kept].tolist(), strict=True)) == lasting
    assert kept.sum() == len(lasting)


def test_no_rows_survive_of_none() -> None:
    nothing = np.array([], dtype=np.int32), np.array([], dtype=np.int64)
    assert not surviving(*nothing).size


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(1, 3), max_size=5)), min_size=1, max_size=5))
def test_the_part_of_a_step_is_that_of_the_incarnation_whose_version_survives(
    trainers: list[tuple[int, list[int]]],
) -> None:
    store, version = DictStore(), 0
    keys, places = list[tuple[int, int]](), list[int]()
    for incarnation, (rolled_back, parts) in enumerate(trainers):
        log, version = LogWriter(store, "streams/consumed", "train-0"), max(0, version - rolled_back)
        for steps in parts:
            first, version = version + 1, version + steps
            record = log.commit("data", incarnation=incarnation, min_policy_version=first, max_policy_version=version)
            keys += [(incarnation, step) for step in range(first, version + 1)]
            places += [record.part] * steps
    incarnations, versions = np.array(keys, np.int64).reshape(-1, 2).T
    held = surviving(incarnations, versions) if keys else np.zeros(0, bool)
    expected = {int(versions[i]): places[i] for i in np.flatnonzero(held)}
    newest = max((version for _, version in keys), default=0)
    found = {step: part_of_step(store, "streams/consumed", step) for step in range(newest + 2)}
    assert {step: record.part for step, record in found.items() if record is not None} == expected
