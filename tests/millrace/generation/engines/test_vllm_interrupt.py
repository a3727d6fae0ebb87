"""vLLM interrupted: what its responses had so far comes back, and continued later they are whole."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.engines.policies import Offer, all_of, largest_mismatch
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.sleeping.engine_alone import make_endless
from millrace.generation.engines.base import unstarted
from millrace.rollouts.groups_in_flight import derived_seed
from millrace.types import Request, Response, Sampling, Trajectory
from millrace.weights.probe import tolerance_between

if TYPE_CHECKING:
    from millrace.generation.engines.vllm.engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.extended]

MakePolicy = Callable[[int], LlamaForCausalLM]

TOLERANCE = tolerance_between("float32", "float32")
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=512)
NUM_REQUESTS = 12


@pytest.fixture
def models(make_policy: MakePolicy) -> dict[int, PreTrainedModel]:
    """The policy of each version. Its responses end at the length limit only."""
    return {version: make_endless(make_policy(version)) for version in (1, 2, 3)}


@pytest.fixture
def engine(vllm_engine: "VllmEngine", models: dict[int, PreTrainedModel], offer: Offer) -> "VllmEngine":
    """The engine with the weights of version 1 and nothing in flight."""
    vllm_engine.update_weights(offer(models[1], 1))
    return vllm_engine


def requests(num: int = NUM_REQUESTS) -> list[Request]:
    return [
        Request(group_id=i, sample_index=0, prompt_tokens=(1, 3 + i % 12, 3 + i % 11), seed=100 + i) for i in range(num)
    ]


def sample_until(engine: "VllmEngine", num_tokens: int) -> None:
    """Waits until that many tokens are in flight."""
    deadline = time.monotonic() + 60
    while engine.tokens_in_flight < num_tokens:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def continued(trajectory: Trajectory, times: int) -> Request:
    """The request for the rest of an unfinished response."""
    request, response = trajectory.request, trajectory.response
    tokens = request.response_tokens + response.tokens
    return replace(request, response_tokens=tokens, seed=derived_seed(100 + request.group_id, times))


def mismatch(models: dict[int, PreTrainedModel], responses: dict[int, Response]) -> float:
    """The largest of the responses to `requests()`, by group; those without tokens are left out."""
    prompts = {request.group_id: request.prompt_tokens for request in requests()}
    return max(largest_mismatch(models, prompts[i], response) for i, response in responses.items() if response.tokens)


def by_group(done: Sequence[Trajectory]) -> dict[int, Trajectory]:
    assert len({trajectory.request.group_id for trajectory in done}) == len(done)
    return {trajectory.request.group_id: trajectory for trajectory in done}


def responses(done: dict[int, Trajectory]) -> dict[int, Response]:
    return {group_id: trajectory.response for group_id, trajectory in done.items()}


def interrupted(engine: "VllmEngine") -> dict[int, Trajectory]:
    """By group; all must be in the middle."""
    reported = engine.tokens_in_flight
    result = by_group(engine.interrupt())
    assert engine.in_flight == engine.tokens_in_flight == 0
    assert result.keys() == set(range(NUM_REQUESTS))
    assert sum(len(trajectory.response.tokens) for trajectory in result.values()) >= reported
    assert {trajectory.response.finish_reason for trajectory in result.values()} == {"unfinished"}
    assert all(trajectory.response.tokens for trajectory in result.values())
    return result


def test_interrupted_twice_under_other_weights_responses_are_whole(
    engine: "VllmEngine", models: dict[int, PreTrainedModel], offer: Offer
) -> None:
    engine.submit(requests(), SAMPLING)
    sample_until(engine, 1000)
    first = interrupted(engine)
    engine.update_weights(offer(models[2], 2))
    assert engine.tokens_in_flight == 0
    engine.submit([continued(trajectory, 1) for trajectory in first.values()], SAMPLING)
    sample_until(engine, 1000)
    engine.update_weights(offer(models[3], 3))
    sample_until(engine, 2000)
    second = interrupted(engine)
    engine.submit([continued(trajectory, 2) for trajectory in second.values()], SAMPLING)
    third = by_group(all_of(engine))

    whole = {i: first[i].response.followed_by(second[i].response).followed_by(third[i].response) for i in first}
    for response in whole.values():
        # A token lost or doubled at a seam would also show in the log-probabilities of those after it.
        assert len(response.tokens) == 512
        assert response.finish_reason == "length"
        assert [version for version, _ in response.version_spans] == [1, 2, 3]
    worst = mismatch(models, whole)
    print(f"{len(whole)} responses of 512 tokens, interrupted twice: |Δ log π| ≤ {worst:.2g}")
    assert worst < TOLERANCE
    # The counter-proof: under the version before, none of it would fit.
    assert mismatch({1: models[3], 2: models[1], 3: models[2]}, whole) > 100 * TOLERANCE


def test_an_interrupt_returns_ended_begun_and_waiting_requests(engine: "VllmEngine") -> None:
    submitted = requests(300)
    ended, begun, waiting = submitted[:4], submitted[4:16], submitted[16:]
    engine.submit(ended, replace(SAMPLING, max_new_tokens=2))
    engine.submit(begun, SAMPLING)
    sample_until(engine, 2 * len(ended) + len(begun))
    # More than the engine has places for.
    engine.submit(waiting, SAMPLING)
    result = by_group(engine.interrupt())
    assert engine.in_flight == 0
    assert [result[request.group_id].request for request in submitted] == submitted
    for request in ended:
        response = result[request.group_id].response
        assert (len(response.tokens), response.finish_reason) == (2, "length")
    for request in begun:
        response = result[request.group_id].response
        assert response.tokens
        assert response.finish_reason == "unfinished"
    without = [result[request.group_id] for request in waiting if not result[request.group_id].response.tokens]
    assert without
    assert without == [unstarted(trajectory.request) for trajectory in without]
    assert engine.collect(0.0) == []
    assert engine.interrupt() == []


def test_an_engine_that_is_paused_after_a_failed_update_returns_what_it_has(
    engine: "VllmEngine", models: dict[int, PreTrainedModel], offer: Offer
) -> None:
    weights = offer(models[2], 2)
    assert weights.shared is not None
    gone = replace(weights, shared=replace(weights.shared, path=f"{weights.shared.path}-gone"))
    engine.submit(requests(), SAMPLING)
    sample_until(engine, 200)
    with pytest.raises(Exception, match="No such file"):
        engine.update_weights(gone)
    first = interrupted(engine)
    engine.update_weights(weights)
    engine.submit([continued(trajectory, 1) for trajectory in first.values()], SAMPLING)
    second = by_group(all_of(engine))
    whole = {i: first[i].response.followed_by(second[i].response) for i in first}
    assert [len(response.tokens) for response in whole.values()] == [512] * NUM_REQUESTS
    assert mismatch(models, whole) < TOLERANCE
