"""Where generators go on after kills and rollbacks, with groups in any order: no prompt skipped, none repeated."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores.memory import unused_name

from configs.operation import StorageConfig
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
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=4)


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
        found = self.checkpoints.latest
        self.version = 0 if found is None else found.step
        self.lineage = Lineage.after(found, self.checkpoints.incarnation)
        if found is not None:
            self.checkpoints.adopt(found, {"lineage": self.lineage.to_json()})

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
        """The generator hears of the trainer's newest weights; what is in flight goes on, or is asked again."""
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
        """One of the groups in flight is whole, and another takes its place."""
        group_id = sorted(self.in_flight)[place]
        oldest = self.in_flight.pop(group_id)
        self.writer.append(self.make_trajectories([group_id], GROUP_SIZE, oldest))
        self.in_flight[next(self.numbers)] = self.sampled_by

    def accepted(self) -> list[int]:
        """The groups whose weights exist for the present trainer, in stream order, as it checks them."""
        path, groups, found = layout.trajectories(1), GroupSet.empty(1, GENERATORS), []
        reader = StreamReader(self.store, path, TRAJECTORY)
        while (part := reader.next()) is not None:
            if self.lineage.holds(part.record.incarnation, part.record.max_policy_version):
                group_ids = list(dict.fromkeys(part.table["group_id"].to_pylist()))
                pass_part(groups, path, part.record, group_ids)
                found += group_ids
                assert committed_groups(self.store, 1, GENERATORS, self.lineage, reader.cursor) == groups
        return found


@pytest.fixture
def campaign(make_trajectories: MakeTrajectories) -> Campaign:
    return Campaign(make_trajectories)


def test_a_generator_begins_with_its_own_number(campaign: Campaign) -> None:
    assert sorted(campaign.in_flight) == [1, 3, 5]


def test_a_restarted_generator_asks_for_what_is_missing_and_then_goes_on(campaign: Campaign) -> None:
    campaign.finish(1)
    campaign.finish(2)
    assert campaign.accepted() == [3, 7]
    campaign.start_generator()
    assert sorted(campaign.in_flight) == [1, 5, 9]


def test_groups_of_a_lost_future_are_made_once_more(campaign: Campaign) -> None:
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
def test_whatever_is_killed_and_whatever_finishes_first_each_group_that_counts_is_there_once(
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
        # Raises if one is there twice, or if a record tells another story than the parts.
        accepted = campaign.accepted()
        assert len(set(accepted)) == len(accepted)
    # In the end nothing is missing: a generator that goes on asks for every group that is not there.
    campaign.start_generator()
    lacking = set(range(1, max(campaign.accepted(), default=1) + 1, GENERATORS)) - set(campaign.accepted())
    assert lacking <= set(itertools.islice(campaign.writer.groups.to_generate(), len(lacking)))


@given(group_ids=st.permutations(range(1, 40, 2)), first=st.integers(0, 20))
def test_groups_in_any_order_leave_the_same_set_and_the_same_to_do(group_ids: list[int], first: int) -> None:
    groups = GroupSet.empty(1, 2)
    for group_id in group_ids[:first]:
        groups.add(group_id)
    assert [group_id in groups for group_id in group_ids] == [i < first for i in range(20)]
    lacking = groups.to_generate()
    for group_id in group_ids[first:]:
        groups.add(group_id)
    # As of when it was asked, whatever is added meanwhile.
    assert list(itertools.islice(lacking, 20 - first)) == sorted(group_ids[first:])
    assert groups == GroupSet(num_generators=2, last=39)


def record(first_row: int, last: int, missing: list[int], *, group_ids: list[int] | None = None) -> Record:
    """Of a part of two groups."""
    return Record(
        seq=0, kind="data", epoch=0, nonce="", writer="", prev="", rows=4, first_row_id=first_row, group_size=2,
        last_group_id=last, missing_groups=missing, group_ids=group_ids or [],
    )  # fmt: skip


def test_a_repeated_and_a_skipped_prompt_are_told_by_their_rows() -> None:
    groups = GroupSet.empty(1, 2)
    pass_part(groups, "streams/trajectories/1", record(0, 5, [1]), [5, 3])
    with pytest.raises(LedgerMismatch, match=r"trajectories/1, rows 4 to 7: group 3"):
        pass_part(groups, "streams/trajectories/1", record(4, 5, []), [1, 3])
    groups = GroupSet(num_generators=2, last=5, missing={1})
    with pytest.raises(LedgerMismatch, match=r"rows 4 to 7: .*disagree about groups \[1\]: a prompt was skipped"):
        pass_part(groups, "streams/trajectories/1", record(4, 9, []), [7, 9])
    with pytest.raises(LedgerMismatch, match="group 8 belongs to another generator"):
        pass_part(GroupSet.empty(1, 2), "streams/trajectories/1", record(0, 8, []), [8])


def test_a_part_that_can_not_be_read_is_passed_by_its_record() -> None:
    groups = GroupSet(num_generators=2, last=5, missing={1})
    pass_part(groups, "s", record(4, 9, [7], group_ids=[9, 1]), None)
    assert groups == GroupSet(num_generators=2, last=9, missing={7})
