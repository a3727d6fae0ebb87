"""Where generators go on after trainers were rolled back: no prompt skipped, none repeated."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores.memory import unused_name

from millrace.errors import LedgerMismatch
from millrace.rollouts.arrow import trajectory_table
from millrace.rollouts.group_sequence import GroupSequence, next_group
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.scored_group import ScoredGroup
from millrace.types import Sampling, Trajectory
from storage import layout
from storage.checkpoints import CheckpointWriter
from storage.schema import TRAJECTORY
from storage.stores.memory import MemoryStore
from storage.streams.stream import StreamReader, StreamWriter

MakeTrajectories = Callable[..., list[Trajectory]]

GENERATORS, GROUP_SIZE = 2, 2


class Campaign:
    """A trainer and generator number 1 of 2, as far as sequence go."""

    def __init__(self, make_trajectories: MakeTrajectories) -> None:
        self.store = MemoryStore(unused_name())
        self.make_trajectories = make_trajectories
        self.version = -1
        self.start_trainer()

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
        self.stream = StreamWriter(self.store, layout.trajectories(1), TRAJECTORY, "generate-1")
        self.take_weights()

    def take_weights(self) -> None:
        """The generator hears of the trainer's newest weights."""
        self.weights = (self.checkpoints.incarnation, self.version)
        self.position = next_group(self.store, 1, GENERATORS, Lineage.of(self.store, self.weights[0]))

    def generate(self, num_groups: int) -> None:
        incarnation, version = self.weights
        group_ids = [self.position + GENERATORS * i for i in range(num_groups)]
        trajectories = self.make_trajectories(group_ids, GROUP_SIZE, version)
        table = trajectory_table(
            trajectories,
            first_row_id=self.stream.rows,
            sampling=Sampling(temperature=1.0, top_p=1.0, max_new_tokens=4),
            incarnation=incarnation,
            generator=1,
            epoch=self.stream.epoch,
        )
        self.stream.write(
            table,
            tokens=sum(len(trajectory.response.tokens) for trajectory in trajectories),
            min_policy_version=version,
            max_policy_version=version,
            incarnation=incarnation,
            last_group_id=group_ids[-1],
        )
        self.position = group_ids[-1] + GENERATORS

    def accepted(self) -> list[int]:
        """The groups whose weights exist for the present trainer, in stream order."""
        reader, groups = StreamReader(self.store, layout.trajectories(1), TRAJECTORY), []
        while (part := reader.next()) is not None:
            if self.lineage.holds(part.record.incarnation, part.record.max_policy_version):
                groups += list(dict.fromkeys(part.table["group_id"].to_pylist()))
        return groups


@pytest.fixture
def campaign(make_trajectories: MakeTrajectories) -> Campaign:
    campaign = Campaign(make_trajectories)
    campaign.start_generator()
    return campaign


def test_a_generator_begins_with_its_own_number(campaign: Campaign) -> None:
    assert campaign.position == 1


def test_a_restarted_generator_goes_on_behind_what_it_committed(campaign: Campaign) -> None:
    campaign.generate(3)
    campaign.start_generator()
    assert campaign.position == 1 + 3 * GENERATORS


def test_groups_of_a_lost_future_are_made_once_more(campaign: Campaign) -> None:
    campaign.generate(1)
    campaign.version = 1
    campaign.checkpoint()
    campaign.take_weights()
    campaign.generate(1)
    campaign.version = 2
    campaign.take_weights()
    campaign.generate(2)
    campaign.start_trainer()
    campaign.take_weights()
    assert campaign.position == 1 + 2 * GENERATORS
    campaign.generate(2)
    assert campaign.accepted() == [1, 3, 5, 7]


actions = st.sampled_from(["step", "step", "checkpoint", "kill trainer", "kill generator", "take", "generate"])


@settings(deadline=None, max_examples=60)
@given(story=st.lists(actions, max_size=30))
def test_whatever_is_killed_the_groups_that_count_are_gapless_and_each_there_once(
    story: list[str], make_trajectories: MakeTrajectories
) -> None:
    campaign = Campaign(make_trajectories)
    campaign.start_generator()
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
            case "generate":
                campaign.generate(2)
        accepted = campaign.accepted()
        assert accepted == [1 + GENERATORS * i for i in range(len(accepted))]


def test_a_skipped_and_a_repeated_prompt_are_told_by_their_rows() -> None:
    def group(group_id: int) -> ScoredGroup:
        return ScoredGroup(
            group_id=group_id,
            generator=1,
            first_row_id=40,
            prompt_tokens=[],
            response_tokens=[],
            rollout_logprobs=[],
            loss_mask=[],
            temperature=1.0,
            rewards=[1.0, 0.0],
            min_policy_versions=np.zeros(2, dtype=np.int64),
            max_policy_versions=np.zeros(2, dtype=np.int64),
            part_max_policy_version=0,
            incarnation=0,
        )

    sequence = GroupSequence(GENERATORS, None)
    sequence.pass_group(group(1))
    sequence.pass_group(group(3))
    with pytest.raises(
        LedgerMismatch, match=r"trajectories/1, rows 40 to 41: found group 7, expected group 5.*skipped"
    ):
        sequence.pass_group(group(7))
    with pytest.raises(LedgerMismatch, match=r"found group 3, expected group 5: a prompt was repeated"):
        sequence.pass_group(group(3))
    resumed = GroupSequence(GENERATORS, list(sequence.next_expected))
    resumed.pass_group(group(5))
