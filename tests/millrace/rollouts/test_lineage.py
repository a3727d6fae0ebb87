"""Stories of killed trainers: which policy versions are still ancestors of the one in training."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.stores.memory import unused_name

from millrace.rollouts.lineage import Lineage, surviving
from storage.checkpoints import CheckpointWriter
from storage.stores.memory import MemoryStore


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


def test_a_first_trainer_knows_its_own_versions_only(memory_store: MemoryStore) -> None:
    lineage = StartedTrainer(memory_store).lineage
    assert lineage.holds(0, 0)
    assert lineage.holds(0, 25)
    assert not lineage.holds(1, 0)


def test_versions_after_the_last_checkpoint_are_a_future_that_is_lost(memory_store: MemoryStore) -> None:
    StartedTrainer(memory_store).checkpoint(20)
    lineage = StartedTrainer(memory_store).lineage
    assert lineage.holds(0, 20)
    assert not lineage.holds(0, 21)
    assert lineage.holds(1, 21)


def test_of_a_trainer_that_died_before_its_first_checkpoint_only_the_base_model_is_left(
    memory_store: MemoryStore,
) -> None:
    StartedTrainer(memory_store)
    lineage = StartedTrainer(memory_store).lineage
    assert last_held(lineage, 0) == 0


def test_of_a_trainer_that_died_before_its_own_checkpoint_its_start_is_left(memory_store: MemoryStore) -> None:
    StartedTrainer(memory_store).checkpoint(20)
    StartedTrainer(memory_store)
    StartedTrainer(memory_store)
    lineage = StartedTrainer(memory_store).lineage
    assert [last_held(lineage, incarnation) for incarnation in range(3)] == [20, 20, 20]


def test_every_incarnation_is_remembered_for_as_far_as_it_was_built_upon(memory_store: MemoryStore) -> None:
    StartedTrainer(memory_store).checkpoint(10)
    StartedTrainer(memory_store).checkpoint(15)
    lineage = StartedTrainer(memory_store).lineage
    assert [last_held(lineage, incarnation) for incarnation in range(3)] == [10, 15, 99]


@given(st.lists(st.sampled_from(["step", "step", "checkpoint", "killed"]), max_size=40))
def test_exactly_the_ancestors_of_the_present_policy_are_held(story: list[str]) -> None:
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
    """Each trainer goes back by some versions, as far as there are any, and makes at least one."""
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


def test_of_no_rows_none_survives() -> None:
    nothing = np.array([], dtype=np.int32), np.array([], dtype=np.int64)
    assert not surviving(*nothing).size
