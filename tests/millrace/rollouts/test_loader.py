"""The loader: trajectories of two generators joined with scores of two scorers, each group returned once."""

import json
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.replay.trained_run import score_rows
from support.stores.memory import unused_name
from support.streams.rows import teacher_rows

from configs.stored import DEFAULT_SOURCE, AnnotationKind, AnnotatorPools, kind_of
from millrace.errors import LedgerMismatch
from millrace.rollouts.arrow import trajectory_table
from millrace.rollouts.ledger import Amount, CommittedAmounts
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.loader import RolloutLoader
from millrace.rollouts.scored_group import LostPart, ScoredGroup
from millrace.types import Sampling, Trajectory
from storage import layout
from storage.errors import StreamCorrupt
from storage.schema import ANNOTATIONS, TRAJECTORY
from storage.stores.memory import MemoryStore
from storage.streams.log import LogReader
from storage.streams.stream import StreamWriter

MakeTrajectories = Callable[..., list[Trajectory]]

GENERATORS, SCORERS, GROUP_SIZE, VOCAB_SIZE = 2, 2, 2, 15
LINEAGE = Lineage(1, {})
ONE_POOL = AnnotatorPools({"scores/r": SCORERS})
_SCORERS_OF_WORDS: dict[tuple[AnnotationKind, str], str | None] = {("scores", "words"): "scores/r@words"}
TWO_POOLS = AnnotatorPools({"scores/r": SCORERS, "scores/r@words": 3}, _SCORERS_OF_WORDS)
"""Of every four groups two are words. A pool writes wrong scores for the groups of the other."""
ONE_TEACHER = AnnotatorPools({"scores/r": SCORERS, "teachers/a": 2}, {("teachers", "words"): "teachers/a"})
TWO_TEACHERS = AnnotatorPools(
    {"scores/r": SCORERS, "scores/r@words": 3, "teachers/much-longer": 1, "teachers/b": 2},
    _SCORERS_OF_WORDS | {("teachers", "words"): "teachers/b"},
    teacher="teachers/much-longer",
)
SHAPE: dict[str, Any] = {"pools": ONE_POOL, "num_generators": GENERATORS}


def taught(pool: str, trajectory: Trajectory | None) -> list[float] | None:
    """What the teacher of a pool says of a trajectory's tokens: all different; None of one that it does not serve."""
    return None if trajectory is None else [-float(token) - len(pool) for token in trajectory.response.tokens]


class StoredRun:
    """The streams of a run in memory, and the groups that a loader should return."""

    def __init__(
        self, make_trajectories: MakeTrajectories, vocab_size: int = VOCAB_SIZE, pools: AnnotatorPools = ONE_POOL
    ) -> None:
        self.pools = pools
        self.store = MemoryStore(unused_name())
        self.make_trajectories = make_trajectories
        self.trajectories = [
            StreamWriter(
                self.store, layout.trajectories(g), TRAJECTORY, "w", vocab_size=vocab_size, group_size=GROUP_SIZE
            )
            for g in range(GENERATORS)
        ]
        self.annotations = {
            pool: [
                [
                    StreamWriter(
                        self.store, layout.annotations(pool, g, s, count), ANNOTATIONS[kind_of(pool)], f"w-{s}"
                    )
                    for s in range(count)
                ]
                for g in range(GENERATORS)
            ]
            for pool, count in pools.replicas.items()
        }
        self.scores = self.annotations["scores/r"]
        self.parts: list[list[list[Trajectory]]] = [[] for _ in range(GENERATORS)]
        self.num_passed = [0] * GENERATORS
        self.waiting: list[deque[int]] = [deque() for _ in range(GENERATORS)]
        self.versions: dict[int, int] = {}

    def generate(self, generator: int, num_groups: int, policy_version: int) -> None:
        """Commits one part of whole groups."""
        made = sum(len(part) for part in self.parts[generator]) // GROUP_SIZE
        group_ids = [generator + GENERATORS * (made + i) for i in range(num_groups)]
        trajectories = [
            replace(each, request=replace(each.request, source="words" if each.request.group_id % 4 > 1 else "default"))
            for each in self.make_trajectories(group_ids, GROUP_SIZE, policy_version)
        ]
        table = trajectory_table(
            trajectories,
            first_row_id=self.trajectories[generator].rows,
            sampling=dict.fromkeys((DEFAULT_SOURCE, "words"), Sampling(temperature=0.5, top_p=1.0, max_new_tokens=4)),
            incarnation=1,
            generator=generator,
            epoch=0,
        )
        self.trajectories[generator].write(
            table,
            tokens=tokens_of(trajectories),
            min_policy_version=policy_version,
            max_policy_version=policy_version,
            incarnation=1,
            group_ids=group_ids,
            last_group_id=group_ids[-1],
        )
        self.parts[generator].append(trajectories)
        self.versions.update(dict.fromkeys(group_ids, policy_version))

    def annotate(self, generator: int, annotator: int, pool: str = "scores/r") -> None:
        """Annotates the annotator's next part of that generator, if there is one."""
        writer = self.annotations[pool][generator][annotator]
        number = writer.parts * self.pools.replicas[pool] + annotator
        if number >= len(self.parts[generator]):
            return
        trajectories = self.parts[generator][number]
        first_row_id = sum(len(part) for part in self.parts[generator][:number])
        kind = kind_of(pool)
        served = [
            trajectory if self.pools.of_source(kind, trajectory.request.source) == pool else None
            for trajectory in trajectories
        ]
        if kind == "scores":
            rewards = [-1.0 if trajectory is None else reward_of(trajectory) for trajectory in served]
            table = score_rows(first_row_id, rewards)
        else:
            table = teacher_rows(first_row_id, [taught(pool, trajectory) for trajectory in served])
        writer.write(table, tokens=tokens_of(trajectories))
        while self.num_passed[generator] < len(self.parts[generator]) and self._is_annotated(generator):
            part = self.parts[generator][self.num_passed[generator]]
            self.waiting[generator] += dict.fromkeys(trajectory.request.group_id for trajectory in part)
            self.num_passed[generator] += 1

    def _is_annotated(self, generator: int) -> bool:
        return all(self._has_passed(pool, generator, self.num_passed[generator]) for pool in self.pools.replicas)

    def _has_passed(self, pool: str, generator: int, part: int) -> bool:
        round_, annotator = divmod(part, self.pools.replicas[pool])
        return self.annotations[pool][generator][annotator].parts > round_

    def generate_and_score(self, generator: int, *policy_versions: int) -> None:
        """Commits and scores a part of two groups for each version."""
        for number, policy_version in enumerate(policy_versions):
            self.generate(generator, num_groups=2, policy_version=policy_version)
            self.annotate(generator, number % SCORERS)

    def first_row_id(self, group: ScoredGroup) -> int:
        """The row at which its generator committed the group."""
        trajectories = [trajectory for part in self.parts[group.generator] for trajectory in part]
        return next(row for row, trajectory in enumerate(trajectories) if trajectory.request.group_id == group.group_id)

    def next_group(self) -> int | None:
        """Removes and returns the group that a loader should return now: the one with the oldest weights."""
        candidates = [(self.versions[group], group, groups) for groups in self.waiting for group in groups]
        if not candidates:
            return None
        _, group, groups = min(candidates)
        groups.remove(group)
        return group

    def amounts(self) -> tuple[Amount, Amount]:
        """(generated, passed by the pool that has passed least)."""
        scored = Amount()
        for generator, parts in enumerate(self.parts):
            by_pool = [
                [part for number, part in enumerate(parts) if self._has_passed(pool, generator, number)]
                for pool in self.pools.replicas
            ]
            least = min(by_pool, key=lambda passed: sum(map(len, passed)))
            scored += amount_of([trajectory for part in least for trajectory in part])
        generated = [trajectory for parts in self.parts for part in parts for trajectory in part]
        return amount_of(generated), scored

    def loader(self, state: list[dict[str, Any]] | None = None) -> RolloutLoader:
        shape = {**SHAPE, "pools": self.pools}
        return RolloutLoader(self.store, **shape, vocab_size=VOCAB_SIZE, lineage=LINEAGE, state=state)


def reward_of(trajectory: Trajectory) -> float | None:
    """A different reward per trajectory; the verification of every fifth one fails."""
    number = trajectory.request.group_id * GROUP_SIZE + trajectory.request.sample_index
    return None if number % 5 == 4 else number / 8


def tokens_of(trajectories: list[Trajectory]) -> int:
    return sum(len(trajectory.response.tokens) for trajectory in trajectories)


def amount_of(trajectories: list[Trajectory]) -> Amount:
    return Amount(rollouts=len(trajectories), tokens=tokens_of(trajectories))


def through_json(state: list[dict[str, Any]]) -> list[dict[str, Any]]:
    copy: list[dict[str, Any]] = json.loads(json.dumps(state))
    return copy


def take_all(loader: RolloutLoader) -> list[ScoredGroup]:
    """The remaining groups of an undamaged run."""
    groups = list(iter(loader.take, None))
    assert all(isinstance(group, ScoredGroup) for group in groups)
    return groups  # type: ignore[return-value]


def take_ids(loader: RolloutLoader) -> list[int]:
    """Ids of the remaining groups, without damaged parts."""
    return [group.group_id for group in iter(loader.take, None) if isinstance(group, ScoredGroup)]


@pytest.fixture
def run(make_trajectories: MakeTrajectories) -> StoredRun:
    """Three parts a generator, of 1 to 3 groups, all scored."""
    run = StoredRun(make_trajectories)
    for generator, parts in enumerate([[(2, 0), (1, 1), (3, 4)], [(1, 0), (3, 2), (2, 3)]]):
        for num_groups, policy_version in parts:
            run.generate(generator, num_groups, policy_version)
        for scorer in (0, 1, 0):
            run.annotate(generator, scorer)
    return run


def test_groups_are_taken_once_and_oldest_weights_first(run: StoredRun) -> None:
    groups = take_all(run.loader())
    assert [group.group_id for group in groups] == [0, 1, 2, 4, 3, 5, 7, 9, 11, 6, 8, 10]
    assert [group.min_policy_version for group in groups] == [0, 0, 0, 1, 2, 2, 2, 3, 3, 4, 4, 4]


def test_a_group_has_its_trajectories_and_their_scores(run: StoredRun) -> None:
    all_of = [trajectory for parts in run.parts for part in parts for trajectory in part]
    trajectories = {(each.request.group_id, each.request.sample_index): each for each in all_of}
    for group in take_all(run.loader()):
        members = [trajectories.pop((group.group_id, index)) for index in range(GROUP_SIZE)]
        assert group.generator == group.group_id % GENERATORS
        assert group.rewards == [reward_of(member) for member in members]
        assert [tokens.tolist() for tokens in group.prompt_tokens] == [list(m.request.prompt_tokens) for m in members]
        assert [tokens.tolist() for tokens in group.response_tokens] == [list(m.response.tokens) for m in members]
        for logprobs, mask, member in zip(group.rollout_logprobs, group.loss_mask, members, strict=True):
            assert logprobs.tolist() == pytest.approx(member.response.rollout_logprobs, rel=1e-6)
            assert mask.tolist() == [1] * len(member.response.tokens)
        assert (group.temperature, group.incarnation) == (0.5, 1)
        assert {group.prompt_id} == {member.prompt.prompt_id for member in members}
        assert group.min_policy_version == members[0].response.version_spans[0][0] == group.part_max_policy_version
        assert group.first_row_id == run.first_row_id(group)
        assert group.amount() == amount_of(members)
        assert group.amount([1]) == amount_of(members[1:])
    assert not trajectories


def test_a_loader_resumed_anywhere_takes_the_remaining_groups(run: StoredRun) -> None:
    everything = [group.group_id for group in take_all(run.loader())]
    for num_taken in range(len(everything) + 1):
        loader = run.loader()
        for _ in range(num_taken):
            loader.take()
        resumed = run.loader(through_json(loader.state()))
        assert resumed.consumed() == loader.consumed()
        assert resumed.state() == loader.state()
        assert [group.group_id for group in take_all(resumed)] == everything[num_taken:]


def test_a_state_does_not_change_when_groups_are_taken(run: StoredRun) -> None:
    # A trainer that stops between two steps has taken groups that its checkpoint does not count.
    loader = run.loader()
    states = []
    for _ in take_all(run.loader()):
        states.append((loader.state(), through_json(loader.state())))
        loader.take()
    assert all(state == as_it_was for state, as_it_was in states)


def test_consumed_amounts_are_the_sum_of_the_taken_groups(run: StoredRun) -> None:
    loader, taken = run.loader(), Amount()
    while (group := loader.take()) is not None:
        taken += group.amount()
        assert sum(loader.consumed(), Amount()) == taken
    assert taken == run.amounts()[0]


actions = st.one_of(
    st.tuples(st.just("generate"), st.integers(0, 1), st.integers(1, 3)),
    st.tuples(st.just("score"), st.integers(0, 1), st.integers(0, 5)),
    st.tuples(st.just("take"), st.just(0), st.integers(1, 3)),
    st.tuples(st.just("resume"), st.just(0), st.just(0)),
)


@pytest.mark.parametrize(
    "pools",
    [ONE_POOL, TWO_POOLS, ONE_TEACHER, TWO_TEACHERS],
    ids=["one pool", "two pools", "one teacher", "two teachers"],
)
@settings(deadline=None, max_examples=80)
@given(data=st.lists(actions, max_size=40))
def test_each_group_is_taken_once_in_any_order_of_events(
    data: list[tuple[str, int, int]], make_trajectories: MakeTrajectories, pools: AnnotatorPools
) -> None:
    run = StoredRun(make_trajectories, pools=pools)
    amounts = CommittedAmounts(run.store, pools=pools, num_generators=GENERATORS)
    loader, taken = run.loader(), Amount()
    for time, (action, first, second) in enumerate(data):
        if action == "generate":
            # A part may be of older weights than the one before it.
            run.generate(first, second, policy_version=(7 * time) % 5 + time // 8)
        elif action == "score":
            pool = list(pools.replicas)[time % len(pools.replicas)]
            run.annotate(first, second % pools.replicas[pool], pool)
        elif action == "resume":
            loader = run.loader(through_json(loader.state()))
        else:
            for _ in range(second):
                group, expected = loader.take(), run.next_group()
                assert (group.group_id if isinstance(group, ScoredGroup) else group) == expected
                if isinstance(group, ScoredGroup):
                    assert -1.0 not in group.rewards
                    pool = pools.of_source("teachers", group.source) or ""
                    for response, logprobs in zip(group.response_tokens, group.teacher_logprobs, strict=True):
                        assert logprobs is not None
                        assert logprobs.tolist() == [-float(token) - len(pool) for token in response if pool]
                taken += group.amount() if group else Amount()
        assert sum(loader.consumed(), Amount()) == taken
        assert amounts.look() == run.amounts()


def test_a_run_that_has_not_begun_has_no_groups(make_trajectories: MakeTrajectories) -> None:
    loader = StoredRun(make_trajectories).loader()
    assert loader.take() is None
    assert loader.consumed() == [Amount()] * GENERATORS


@pytest.mark.parametrize(("first_row_id", "rows"), [(4, 4), (0, 2), (0, 6)])
def test_scores_that_do_not_match_the_rows_are_corrupt(
    make_trajectories: MakeTrajectories, first_row_id: int, rows: int
) -> None:
    run = StoredRun(make_trajectories)
    run.generate(1, num_groups=2, policy_version=0)
    record = run.scores[1][0].write(score_rows(first_row_id, [1.0] * rows), tokens=0)
    with pytest.raises(StreamCorrupt) as caught:
        run.loader().take()
    assert (caught.value.file, caught.value.record) == (f"streams/scores/r/1/0-of-2/{record.file}", record.seq)


def test_scores_of_a_part_that_does_not_exist_are_corrupt(make_trajectories: MakeTrajectories) -> None:
    run = StoredRun(make_trajectories)
    run.scores[1][0].write(score_rows(0, [1.0] * 4), tokens=0)
    with pytest.raises(StreamCorrupt) as caught:
        run.loader().take()
    assert caught.value.file == layout.trajectories(1)


def damage(store: MemoryStore, stream: str, part: int) -> int:
    """Flips one bit in the file of a part; returns the number of its record."""
    reader = LogReader(store, stream)
    while (record := reader.next()) is not None:
        if record.kind == "data" and record.part == part:
            file = store.local_path(f"{stream}/{record.file}")
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
            return record.seq
    raise AssertionError(f"{stream} has no part {part}")


@pytest.mark.parametrize("stream", [layout.trajectories(0), layout.annotations("scores/r", 0, 1, SCORERS)])
def test_a_damaged_part_is_lost_and_its_neighbours_are_taken(run: StoredRun, stream: str) -> None:
    # Part 1 of generator 0's trajectories is part 0 of what scorer 1 made of them.
    damage(run.store, stream, part=1 if stream == layout.trajectories(0) else 0)
    loader = run.loader()
    taken = list(iter(loader.take, None))
    lost = [part for part in taken if isinstance(part, LostPart)]
    assert [(part.generator, part.record.part, part.record.last_group_id) for part in lost] == [(0, 1, 4)]
    assert lost[0].amount() == amount_of(run.parts[0][1])
    assert lost[0].num_groups == len(lost[0].record.group_ids)
    assert lost[0].reason.startswith(stream)
    assert [group.group_id for group in taken if isinstance(group, ScoredGroup)] == [0, 1, 2, 3, 5, 7, 9, 11, 6, 8, 10]
    assert loader.consumed() == [amount_of([each for part in parts for each in part]) for parts in run.parts]


def test_only_the_untaken_rest_of_a_damaged_part_is_lost(run: StoredRun) -> None:
    loader = run.loader()
    first = [loader.take() for _ in range(6)]
    assert [group.group_id for group in first if isinstance(group, ScoredGroup)][-2:] == [3, 5]
    damage(run.store, layout.trajectories(1), part=1)
    resumed = run.loader(through_json(loader.state()))
    rest = list(iter(resumed.take, None))
    (lost,) = [part for part in rest if isinstance(part, LostPart)]
    assert 0 < lost.num_groups < len(lost.record.group_ids)
    assert lost.amount() == amount_of(
        [trajectory for trajectory in run.parts[1][1] if trajectory.request.group_id == 7]
    )
    assert [group.group_id for group in rest if isinstance(group, ScoredGroup)] == [9, 11, 6, 8, 10]
    assert resumed.consumed() == [amount_of([each for part in parts for each in part]) for parts in run.parts]


def test_a_late_group_of_old_weights_is_taken_first(make_trajectories: MakeTrajectories) -> None:
    run = StoredRun(make_trajectories)
    run.generate_and_score(0, 5, 6, 2)
    assert take_ids(run.loader()) == [8, 10, 0, 2, 4, 6]


def test_groups_taken_out_of_order_are_not_taken_again_after_a_restart(make_trajectories: MakeTrajectories) -> None:
    run = StoredRun(make_trajectories)
    run.generate_and_score(0, 5, 2, 6)
    loader = run.loader()
    for _ in range(3):
        loader.take()
    resumed = run.loader(through_json(loader.state()))
    assert resumed.consumed() == loader.consumed()
    assert resumed.state() == loader.state()
    damage(run.store, layout.trajectories(0), part=1)
    assert take_ids(resumed) == [2, 8, 10], "no group of the damaged part was left"
    assert sum(resumed.consumed(), Amount()) == run.amounts()[1]


def test_groups_of_lost_versions_come_first_and_may_repeat(make_trajectories: MakeTrajectories) -> None:
    run = StoredRun(make_trajectories)
    run.generate_and_score(0, 3)
    run.parts[0] = []
    run.generate(0, num_groups=1, policy_version=1)
    loader = RolloutLoader(run.store, **SHAPE, vocab_size=VOCAB_SIZE, lineage=Lineage(2, {1: 1}), state=None)
    assert take_ids(loader) == [0, 2]


def test_a_repeated_group_is_a_mismatch(make_trajectories: MakeTrajectories) -> None:
    run = StoredRun(make_trajectories)
    run.generate_and_score(0, 3)
    run.parts[0].append(run.parts[0].pop()[:2])
    run.generate(0, num_groups=1, policy_version=3)
    run.scores[0][1].write(score_rows(4, [1.0] * 2), tokens=0)
    with pytest.raises(LedgerMismatch) as caught:
        run.loader().take()
    assert "rows 4 to 5: group 2" in str(caught.value)


def test_tokens_of_another_vocabulary_are_corrupt(make_trajectories: MakeTrajectories) -> None:
    run = StoredRun(make_trajectories, vocab_size=16)
    run.generate_and_score(0, 0)
    with pytest.raises(StreamCorrupt) as caught:
        run.loader().take()
    assert (caught.value.file.startswith(layout.trajectories(0)), caught.value.record) == (True, 1)
