"""Group numbers after kills and rollbacks: each prompt is generated once, and none is skipped."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores.memory import unused_name

from configs.operation import StorageConfig
from configs.stored import DEFAULT_SOURCE
from millrace.errors import LedgerMismatch
from millrace.rollouts.group_sequence import GroupSet, committed_groups, pass_part
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.writer import TrajectoryWriter
from millrace.types import Sampling, Trajectory
from storage import layout
from storage.checkpoints import CheckpointWriter
from storage.schema import TRAJECTORY
from storage.stores.memory import MemoryStore
from storage.streams.record import Record
from storage.streams.stream import StreamReader

MakeTrajectories = Callable[..., list[Trajectory]]

GENERATORS, GROUP_SIZE, PLACES = 2, 2, 3
SAMPLING = {DEFAULT_SOURCE: Sampling(temperature=1.0, top_p=1.0, max_new_tokens=4)}


class Campaign:
    """A trainer and generator number 1 of 2, as far as their groups go; up to `PLACES` groups are in flight."""

    def __init__(self, make_trajectories: MakeTrajectories) -> None:
        self.store = MemoryStore(unused_name())
        self.make_trajectories = make_trajectories
        self.version = -1
        self.start_trainer()
        self.start_generator()

    def start_trainer(self) -> None:
        self.checkpoints = CheckpointWriter(self.store)
        latest = self.checkpoints.latest
        self.version = 0 if latest is None else latest.step
        self.lineage = Lineage.after(latest, self.checkpoints.incarnation)
        if latest is not None:
            self.checkpoints.adopt(latest, {"lineage": self.lineage.to_json()})

    def checkpoint(self) -> None:
        self.checkpoints.commit(self.version, {}, {"lineage": self.lineage.to_json()})

    def start_generator(self) -> None:
        self.writer = TrajectoryWriter(
            self.store,
            1,
            SAMPLING,
            StorageConfig(commit_max_ms=0),
            vocab_size=64,
            group_size=GROUP_SIZE,
            num_generators=GENERATORS,
        )
        self.incarnation = -1
        self.take_weights()

    def take_weights(self) -> None:
        """The generator receives the newest weights; after a rollback its groups in flight are requested again."""
        self.sampled_by = self.version
        if self.incarnation != self.checkpoints.incarnation:
            self.incarnation = self.checkpoints.incarnation
            self.writer.restart(Lineage.of(self.store, self.incarnation))
            self.in_flight: dict[int, int] = {}
            self.numbers = self.writer.groups.to_generate()
        # Group → the oldest weights that sampled it.
        while len(self.in_flight) < PLACES:
            self.in_flight[next(self.numbers)] = self.version

    def finish(self, place: int) -> None:
        """Completes a group in flight, and starts another in its place."""
        group_id = sorted(self.in_flight)[place]
        oldest = self.in_flight.pop(group_id)
        self.writer.append(self.make_trajectories([group_id], GROUP_SIZE, oldest))
        self.in_flight[next(self.numbers)] = self.sampled_by

    def accepted(self) -> list[int]:
        """The groups whose weights exist for the present trainer, in stream order, as it checks them."""
        path, groups, accepted = layout.trajectories(1), GroupSet.empty(1, GENERATORS), []
        reader = StreamReader(self.store, path, TRAJECTORY)
        while (part := reader.next()) is not None:
            if self.lineage.holds(part.record.incarnation, part.record.max_policy_version):
                group_ids = list(dict.fromkeys(part.table["group_id"].to_pylist()))
                pass_part(groups, path, part.record, group_ids)
                accepted += group_ids
                assert committed_groups(self.store, 1, GENERATORS, self.lineage, reader.cursor) == groups
        return accepted


@pytest.fixture
def campaign(make_trajectories: MakeTrajectories) -> Campaign:
    return Campaign(make_trajectories)


def test_a_generator_begins_with_its_number(campaign: Campaign) -> None:
    assert sorted(campaign.in_flight) == [1, 3, 5]


def test_a_restarted_generator_requests_missing_groups_first(campaign: Campaign) -> None:
    campaign.finish(1)
    campaign.finish(2)
    assert campaign.accepted() == [3, 7]
    campaign.start_generator()
    assert sorted(campaign.in_flight) == [1, 5, 9]


def test_groups_of_lost_versions_are_generated_again(campaign: Campaign) -> None:
    campaign.finish(0)
    campaign.version = 1
    campaign.checkpoint()
    campaign.take_weights()
    campaign.finish(1)
    campaign.version = 2
    campaign.take_weights()
    campaign.in_flight = dict.fromkeys(campaign.in_flight, 2)
    campaign.finish(0)
    assert campaign.accepted() == [1, 5, 3]
    campaign.start_trainer()
    assert campaign.accepted() == [1, 5], "group 3 was sampled by version 2, which is lost"
    campaign.take_weights()
    assert sorted(campaign.in_flight) == [3, 7, 9]
    campaign.finish(0)
    assert campaign.accepted() == [1, 5, 3]


events = st.one_of(
    st.sampled_from(["step", "checkpoint", "kill trainer", "kill generator", "take"]),
    st.integers(0, PLACES - 1),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(story=st.lists(events, max_size=40))
def test_each_group_is_accepted_once_through_kills_and_rollbacks(
    story: list[str | int], make_trajectories: MakeTrajectories
) -> None:
    campaign = Campaign(make_trajectories)
    for event in story:
        match event:
            case "step":
                campaign.version += 1
            case "checkpoint":
                campaign.checkpoint()
            case "kill trainer":
                campaign.start_trainer()
            case "kill generator":
                campaign.start_generator()
            case "take":
                campaign.take_weights()
            case int(place):
                campaign.finish(place)
        # Raises if a group is stored twice, or if a record disagrees with the parts.
        accepted = campaign.accepted()
        assert len(set(accepted)) == len(accepted)
    # A restarted generator requests every group that is missing.
    campaign.start_generator()
    missing = set(range(1, max(campaign.accepted(), default=1) + 1, GENERATORS)) - set(campaign.accepted())
    assert missing <= set(itertools.islice(campaign.writer.groups.to_generate(), len(missing)))


@given(group_ids=st.permutations(range(1, 40, 2)), first=st.integers(0, 20))
def test_groups_may_be_added_in_any_order(group_ids: list[int], first: int) -> None:
    groups = GroupSet.empty(1, 2)
    for group_id in group_ids[:first]:
        groups.add(group_id)
    assert [group_id in groups for group_id in group_ids] == [i < first for i in range(20)]
    missing = groups.to_generate()
    for group_id in group_ids[first:]:
        groups.add(group_id)
    # The groups that were missing at the call, whatever was added since.
    assert list(itertools.islice(missing, 20 - first)) == sorted(group_ids[first:])
    assert groups == GroupSet(num_generators=2, last=39)


def record(first_row: int, last: int, missing: list[int], *, group_ids: list[int] | None = None) -> Record:
    """The record of a part of two groups."""
    return Record(
        seq=0, kind="data", epoch=0, nonce="", writer="", prev="", rows=4, first_row_id=first_row, group_size=2,
        last_group_id=last, missing_groups=missing, group_ids=group_ids or [],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("missing", "part", "group_ids", "named"),
    [
        ({1}, record(4, 5, []), [1, 3], "group 3"),
        ({1}, record(4, 9, []), [7, 9], "groups [1]"),
        (set(), record(4, 8, []), [8], "group 8"),
    ],
    ids=["repeated", "skipped", "of another generator"],
)
def test_a_wrong_group_is_named_with_its_rows(
    missing: set[int], part: Record, group_ids: list[int], named: str
) -> None:
    groups = GroupSet(num_generators=2, last=5, missing=missing)
    with pytest.raises(LedgerMismatch) as caught:
        pass_part(groups, "streams/trajectories/1", part, group_ids)
    assert "trajectories/1, rows 4 to 7" in str(caught.value)
    assert named in str(caught.value)


def test_an_unreadable_part_is_passed_by_its_record() -> None:
    groups = GroupSet(num_generators=2, last=5, missing={1})
    pass_part(groups, "s", record(4, 9, [7], group_ids=[9, 1]), None)
    assert groups == GroupSet(num_generators=2, last=9, missing={7})
