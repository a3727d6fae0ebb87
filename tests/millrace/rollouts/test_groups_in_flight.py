"""Groups in flight: admitted in order, completed in any order, and continued after an interruption."""

import random
from dataclasses import replace

import pytest

from millrace.rollouts.groups_in_flight import GroupsInFlight, derived_seed, num_tokens
from millrace.types import FinishReason, Prompt, Request, Response, Trajectory

GROUP_SIZE = 3


def prompt(group_id: int) -> Prompt:
    return Prompt(prompt_id=f"p{group_id}", text=f"{group_id}+1=", answer=str(group_id + 1), source="test")


def admit(
    groups: GroupsInFlight,
    group_id: int,
    begun: dict[int, Trajectory] | None = None,
    policy_version: int = 0,
    size: int = GROUP_SIZE,
    source: str = "sums",
) -> list[Request]:
    return groups.admit(
        group_id,
        prompt(group_id),
        (1, group_id),
        policy_version,
        group_id + 0.5,
        begun,
        source=source,
        group_size=size,
    )


def finished(request: Request) -> Trajectory:
    token = 10 * request.group_id + request.sample_index
    response = Response(
        tokens=(token,), rollout_logprobs=(-0.5,), version_spans=((request.group_id, 0),), finish_reason="stop"
    )
    return Trajectory(request=request, response=response, t_started=token + 0.25, t_finished=token + 0.75)


def test_a_whole_group_does_not_wait_for_others() -> None:
    groups = GroupsInFlight(run_seed=0)
    first, second, third = (admit(groups, group_id) for group_id in (4, 6, 8))
    for request in [*second, *first[1:], *third[:2]]:
        groups.add(finished(request))
    assert [trajectory.request.group_id for trajectory in groups.take()] == [6] * GROUP_SIZE
    assert groups.take() == []
    assert len(groups) == 2
    groups.add(finished(third[2]))
    groups.add(finished(first[0]))
    assert [trajectory.request.group_id for trajectory in groups.take()] == [4] * GROUP_SIZE + [8] * GROUP_SIZE
    assert len(groups) == 0


def test_groups_have_the_size_and_the_source_they_were_admitted_with() -> None:
    groups = GroupsInFlight(run_seed=0)
    requests = [*admit(groups, 0, size=2), *admit(groups, 1, size=4, source="words")]
    assert [(request.group_id, request.sample_index, request.source) for request in requests] == [
        *((0, i, "sums") for i in range(2)),
        *((1, i, "words") for i in range(4)),
    ]
    for request in requests[:-1]:
        groups.add(finished(request))
    assert [each.request for each in groups.take()] == requests[:2]
    groups.add(finished(requests[-1]))
    assert [each.request for each in groups.take()] == requests[2:]


@pytest.mark.parametrize("seed", range(20))
def test_trajectories_finished_in_any_order_are_taken_once_in_groups(seed: int) -> None:
    chance = random.Random(seed)
    groups = GroupsInFlight(run_seed=seed)
    to_admit = list(range(seed, seed + 40, 2))
    expected = [(group_id, index) for group_id in to_admit for index in range(GROUP_SIZE)]
    in_flight: list[Request] = []
    taken: list[tuple[int, int]] = []
    while to_admit or in_flight:
        if to_admit and chance.random() < 0.4:
            in_flight += admit(groups, to_admit.pop(0))
        elif in_flight:
            groups.add(finished(in_flight.pop(chance.randrange(len(in_flight)))))
        taken += [(trajectory.request.group_id, trajectory.request.sample_index) for trajectory in groups.take()]
    assert sorted(taken) == expected, f"seed {seed}"
    assert taken != expected, f"seed {seed}: nothing was ever out of order"
    assert [index for _, index in taken] == list(range(GROUP_SIZE)) * 20


def partly(
    request: Request, tokens: int, version: int, finish_reason: FinishReason = "unfinished", truncated: bool = True
) -> Trajectory:
    """An engine's response: `tokens` more, all of one version; if `truncated`, each token is its only kept token."""
    start = len(request.response_tokens)
    response = Response(
        tokens=tuple(range(start, start + tokens)),
        rollout_logprobs=tuple(-float(i) for i in range(start, start + tokens)),
        version_spans=((version, 0),) if tokens else (),
        finish_reason=finish_reason,
        kept_tokens=tuple(range(start, start + tokens)) if truncated else (),
        kept_counts=(1,) * tokens if truncated else (),
        # One layer, and one expert per token: the version.
        routed_experts=version.to_bytes(2, "little") * (len(request.prompt_tokens) + start + tokens - 1),
    )
    return Trajectory(request=request, response=response, t_started=100.0 + version, t_finished=200.0 + version)


def test_interrupted_responses_are_continued_and_joined() -> None:
    groups = GroupsInFlight(run_seed=7)
    requests = admit(groups, 5, policy_version=3)
    groups.add(partly(requests[0], 2, 3, "length"))
    interrupted = groups.interrupt([partly(requests[1], 4, 3), partly(requests[2], 0, 3)])
    assert len(groups) == 0
    assert num_tokens(interrupted) == 6
    assert {trajectory.request.sample_index for trajectory in interrupted} == {0, 1}, "the third had no token yet"

    # Another process, which does not have the requests of the first.
    later = GroupsInFlight(run_seed=7)
    bare = {
        trajectory.request.sample_index: replace(trajectory, request=replace(trajectory.request, seed=0))
        for trajectory in interrupted
    }
    requested = admit(later, 5, bare, policy_version=4)
    assert [(r.sample_index, r.response_tokens) for r in requested] == [(1, (0, 1, 2, 3)), (2, ())]
    assert requested[0].seed == derived_seed(requests[1].seed, 4), "other draws than its first tokens had"
    assert requested[1].seed == requests[2].seed
    assert (later.tokens, later.oldest_version, later.t_oldest) == (6, 3, 5.5)
    again = later.interrupt([partly(requested[0], 2, 4), partly(requested[1], 1, 4)])
    last = GroupsInFlight(run_seed=7)
    requested = admit(last, 5, {trajectory.request.sample_index: trajectory for trajectory in again}, policy_version=6)
    for request in requested:
        last.add(partly(request, 1, 6, "stop"))
    whole = last.take()
    assert [trajectory.response.tokens for trajectory in whole] == [(0, 1), tuple(range(7)), (0, 1)]
    assert [trajectory.response.rollout_logprobs[-1] for trajectory in whole] == [-1.0, -6.0, -1.0]
    assert [trajectory.response.kept_tokens for trajectory in whole] == [
        trajectory.response.tokens for trajectory in whole
    ]
    assert [trajectory.response.kept_counts for trajectory in whole] == [(1,) * 2, (1,) * 7, (1,) * 2]
    # Experts that computed each token but the last for the first time.
    experts = [3] * (len(requests[1].prompt_tokens) + 3) + [4, 4, 6]
    assert whole[1].response.routed_experts == b"".join(trajectory.to_bytes(2, "little") for trajectory in experts)
    assert [trajectory.response.version_spans for trajectory in whole] == [
        ((3, 0),),
        ((3, 0), (4, 4), (6, 6)),
        ((4, 0), (6, 1)),
    ]
    assert [trajectory.response.finish_reason for trajectory in whole] == ["length", "stop", "stop"]
    assert [trajectory.request for trajectory in whole] == requests, "as if each had been requested once"
    assert [(trajectory.t_started, trajectory.t_finished) for trajectory in whole] == [
        (103.0, 203.0),
        (103.0, 206.0),
        (104.0, 206.0),
    ]


def test_a_response_continued_under_the_same_version_has_one_span() -> None:
    groups = GroupsInFlight(run_seed=0)
    (request,) = admit(groups, 0, size=1)
    (begun,) = groups.interrupt([partly(request, 3, 2)])
    (request,) = admit(groups, 0, {0: begun}, size=1)
    groups.add(partly(request, 2, 2, "stop"))
    assert groups.take()[0].response.version_spans == ((2, 0),)


def test_a_waiting_response_keeps_its_tokens_when_interrupted_again() -> None:
    groups = GroupsInFlight(run_seed=0)
    requests = admit(groups, 2)
    begun = groups.interrupt([partly(request, 2, 1) for request in requests])
    admit(groups, 2, {trajectory.request.sample_index: trajectory for trajectory in begun})
    # The engine got none of them.
    assert groups.interrupt([]) == begun


def test_a_trajectory_has_its_admitted_request_and_its_response() -> None:
    groups = GroupsInFlight(run_seed=11)
    requests = admit(groups, 7)
    assert requests == admit(GroupsInFlight(run_seed=11), 7), "a restarted generator makes equal requests"
    assert [request.seed for request in requests] == [derived_seed(11, 7, index) for index in range(GROUP_SIZE)]
    assert {request.prompt for request in requests} == {prompt(7)}
    for request in reversed(requests):
        groups.add(finished(request))
    assert groups.take() == [finished(request) for request in requests]


def test_seeds_differ_by_run_group_and_place_and_fit_63_bits() -> None:
    seeds = {derived_seed(run, group, index) for run in range(5) for group in range(50) for index in range(8)}
    assert len(seeds) == 5 * 50 * 8
    assert min(seeds) >= 0
    assert 2**60 < max(seeds) < 2**63
    # A stored run names its seeds: they must not change from one release to the next.
    assert derived_seed(0, 0, 0) == 8387133978117270309


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_a_partly_truncated_response_has_a_kept_count_per_token(first: bool, second: bool) -> None:
    groups = GroupsInFlight(run_seed=7)
    (begun,) = admit(groups, 0, size=1)
    stored = groups.interrupt([partly(begun, 2, 0, truncated=first)])
    (rest,) = admit(groups, 0, {0: stored[0]}, size=1)
    response = groups.add(partly(rest, 1, 0, "stop", truncated=second)).response
    assert response.kept_tokens == (*((0, 1) if first else ()), *((2,) if second else ()))
    assert response.kept_counts == ((first, first, second) if first or second else ())
