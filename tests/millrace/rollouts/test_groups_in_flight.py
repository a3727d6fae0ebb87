"""Groups are admitted in order, finished in any order, and handed on in order."""

import random

import pytest

from millrace.rollouts.groups_in_flight import GroupsInFlight, trajectory_seed
from millrace.types import Prompt, Request, Response, Trajectory

GROUP_SIZE = 3


def prompt(group_id: int) -> Prompt:
    return Prompt(prompt_id=f"p{group_id}", text=f"{group_id}+1=", answer=str(group_id + 1), source="test")


def admit(groups: GroupsInFlight, group_id: int) -> list[Request]:
    return groups.admit(group_id, prompt(group_id), (1, group_id), t_admitted=group_id + 0.5)


def finished(request: Request) -> Trajectory:
    token = 10 * request.group_id + request.sample_index
    response = Response(
        tokens=(token,), rollout_logprobs=(-0.5,), version_spans=((request.group_id, 0),), finish_reason="stop"
    )
    return Trajectory(request=request, response=response, t_started=token + 0.25, t_finished=token + 0.75)


def test_a_group_that_is_whole_waits_for_the_one_before_it() -> None:
    groups = GroupsInFlight(GROUP_SIZE, run_seed=0)
    first, second, third = (admit(groups, group_id) for group_id in (4, 6, 8))
    for request in [*second, *first[1:], *third[:2]]:
        groups.add(finished(request))
        assert groups.take() == [], "group 4 has one to come"
    groups.add(finished(first[0]))
    assert [trajectory.request.group_id for trajectory in groups.take()] == [4] * GROUP_SIZE + [6] * GROUP_SIZE
    assert groups.take() == []
    assert len(groups) == 1
    groups.add(finished(third[2]))
    assert [trajectory.request.group_id for trajectory in groups.take()] == [8] * GROUP_SIZE
    assert len(groups) == 0


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_finished_first_all_trajectories_come_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    groups = GroupsInFlight(GROUP_SIZE, run_seed=seed)
    to_admit = list(range(seed, seed + 40, 2))
    expected = [(group_id, index) for group_id in to_admit for index in range(GROUP_SIZE)]
    in_flight: list[Request] = []
    taken: list[tuple[int, int]] = []
    waited = 0
    while to_admit or in_flight:
        if to_admit and chance.random() < 0.4:
            in_flight += admit(groups, to_admit.pop(0))
        elif in_flight:
            groups.add(finished(in_flight.pop(chance.randrange(len(in_flight)))))
        trajectories = groups.take()
        waited += bool(in_flight) and not trajectories
        taken += [(trajectory.request.group_id, trajectory.request.sample_index) for trajectory in trajectories]
    assert taken == expected, f"seed {seed}"
    assert waited, f"seed {seed}: nothing was ever out of order"


def test_a_trajectory_is_what_was_admitted_and_what_came_back_for_it() -> None:
    groups = GroupsInFlight(GROUP_SIZE, run_seed=11)
    requests = admit(groups, 7)
    for request in reversed(requests):
        groups.add(finished(request))
    for index, trajectory in enumerate(groups.take()):
        sampled = finished(requests[index])
        assert (trajectory.request.group_id, trajectory.request.sample_index) == (7, index)
        assert trajectory.prompt == prompt(7)
        assert tuple(trajectory.request.prompt_tokens) == (1, 7)
        assert trajectory.response == sampled.response
        assert trajectory.request.seed == trajectory_seed(11, 7, index)
        times = (trajectory.request.t_admitted, trajectory.t_started, trajectory.t_finished)
        assert times == (7.5, sampled.t_started, sampled.t_finished)


def test_what_was_cleared_never_comes_and_the_same_groups_can_be_admitted_again() -> None:
    groups = GroupsInFlight(GROUP_SIZE, run_seed=0)
    for request in admit(groups, 4)[:2]:
        groups.add(finished(request))
    groups.clear()
    assert (len(groups), groups.take()) == (0, [])
    again = admit(groups, 4)
    groups.add(finished(again[2]))
    assert groups.take() == [], "the two of before do not count"


def test_a_trajectory_that_is_asked_for_again_gets_the_seed_it_had() -> None:
    groups, later = GroupsInFlight(GROUP_SIZE, run_seed=5), GroupsInFlight(GROUP_SIZE, run_seed=5)
    admit(groups, 3)
    assert admit(groups, 4) == admit(later, 4)


def test_seeds_differ_by_run_group_and_place_and_fit_63_bits() -> None:
    seeds = {trajectory_seed(run, group, index) for run in range(5) for group in range(50) for index in range(8)}
    assert len(seeds) == 5 * 50 * 8
    assert min(seeds) >= 0
    assert 2**60 < max(seeds) < 2**63
    # A stored run names its seeds: they must not change from one release to the next.
    assert trajectory_seed(0, 0, 0) == 8387133978117270309
