"""The engine whose requests take their own time, on a clock that only sleeping moves."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from benchmarks.sleeping.engines import LongTailEngine
from benchmarks.sleeping.pace import LongTail
from millrace.types import Request, Sampling
from millrace.weights.base import Manifest, Weights, WeightsId

TAIL = LongTail(sigma=0.6, mean_tokens=100, seconds_per_token=0.01, places=4)
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=4096)


@dataclass
class Clock:
    """A clock that only sleeping moves."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def long_tail_engine(
    clock: Clock, *, places: int = 4, updated: Callable[[WeightsId, float], None] = lambda *_: None
) -> LongTailEngine:
    tail = replace(TAIL, places=places)
    return LongTailEngine(tail, vocab_size=9, eos_token_id=2, updated=updated, clock=clock, sleep=clock.sleep)


def requests(number: int) -> list[Request]:
    return [Request(group_id=i, sample_index=0, prompt_tokens=(1,), seed=i) for i in range(number)]


def weights(version: int) -> Weights:
    return Weights(manifest=Manifest(id=WeightsId(incarnation=0, policy_version=version, t_offered=0.0)), tensors={})


def test_lengths_have_the_mean_and_depend_on_the_place_in_the_run_alone() -> None:
    lengths = [TAIL.tokens(group, i) for group in range(2000) for i in range(4)]
    assert sum(lengths) / len(lengths) == pytest.approx(TAIL.mean_tokens, rel=0.03)
    assert lengths[:8] == [replace(TAIL, places=99).tokens(group, i) for group in range(2) for i in range(4)]


def test_each_request_ends_after_its_own_length() -> None:
    clock = Clock()
    engine = long_tail_engine(clock)
    engine.submit(requests(4), SAMPLING)
    while engine.in_flight:
        for done in engine.collect(10.0):
            length = TAIL.tokens(done.request.group_id, 0)
            assert len(done.response.tokens) == length
            assert done.t_finished - done.t_started == pytest.approx(length * TAIL.seconds_per_token)
            assert clock.now == pytest.approx(done.t_finished)


def test_a_request_in_flight_goes_on_under_new_weights_from_the_token_it_stands_at() -> None:
    clock, taken = Clock(), []
    engine = long_tail_engine(clock, updated=lambda weights, seconds: taken.append((weights.policy_version, seconds)))
    engine.submit(requests(2), SAMPLING)
    # No token is sampled under version 0.
    engine.update_weights(weights(1))
    clock.sleep(0.105)
    engine.update_weights(weights(2))
    clock.sleep(100.0)
    assert {done.response.version_spans for done in engine.collect(0.0)} == {((1, 0), (2, 10))}
    assert taken == [(1, 0.0), (2, pytest.approx(2 * 0.105))]


def test_an_interrupted_request_is_continued_and_has_only_the_rest_to_do() -> None:
    clock = Clock()
    engine = long_tail_engine(clock, places=1)
    request, in_line = requests(2)
    engine.submit([request, in_line], SAMPLING)
    clock.sleep(0.105)
    cut, unstarted = engine.interrupt()
    assert engine.in_flight == 0
    assert len(cut.response.tokens) == 10
    assert (cut.response.finish_reason, unstarted.response.tokens) == ("unfinished", ())
    engine.submit([replace(request, response_tokens=cut.response.tokens, seed=77)], SAMPLING)
    (rest,) = engine.collect(100.0)
    assert len(rest.response.tokens) == TAIL.tokens(0, 0) - 10
    assert rest.t_finished - rest.t_started == pytest.approx(len(rest.response.tokens) * TAIL.seconds_per_token)
