"""The engine whose requests take their own time, on a clock that only sleeping moves, and the meter around it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from benchmarks.engine_share import between
from benchmarks.sleeping.engine import SleepingEngine
from benchmarks.sleeping.metered_engine import MeteredEngine, MeterReading
from benchmarks.sleeping.pace import SleepingPace
from millrace.types import Request, Sampling
from millrace.weights.base import Manifest, Weights, WeightsId

PACE = SleepingPace(sigma=0.6, mean_tokens=100, seconds_per_token=0.01, slots=4)
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=4096)


@dataclass
class Clock:
    """A clock that only sleeping moves."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def sleeping_engine(
    clock: Clock, *, slots: int = 4, updated: Callable[[WeightsId, float], None] = lambda *_: None
) -> SleepingEngine:
    pace = replace(PACE, slots=slots)
    return SleepingEngine(pace, vocab_size=9, eos_token_id=2, updated=updated, clock=clock, sleep=clock.sleep)


def requests(number: int) -> list[Request]:
    return [Request(group_id=i, sample_index=i % 2, prompt_tokens=(1,), seed=i) for i in range(number)]


def weights(version: int) -> Weights:
    return Weights(manifest=Manifest(id=WeightsId(incarnation=0, policy_version=version, t_offered=0.0)), tensors={})


def test_lengths_have_the_mean_and_are_the_same_in_every_run() -> None:
    lengths = [PACE.num_tokens(group, i) for group in range(2000) for i in range(4)]
    assert sum(lengths) / len(lengths) == pytest.approx(PACE.mean_tokens, rel=0.03)
    assert lengths[:8] == [replace(PACE, slots=99).num_tokens(group, i) for group in range(2) for i in range(4)]


def test_each_request_ends_after_its_own_length() -> None:
    clock = Clock()
    engine = sleeping_engine(clock)
    engine.submit(requests(4), SAMPLING)
    while engine.in_flight:
        for done in engine.collect(10.0):
            length = PACE.num_tokens(done.request.group_id, done.request.sample_index)
            assert len(done.response.tokens) == length
            assert done.t_finished - done.t_started == pytest.approx(length * PACE.seconds_per_token)
            assert clock.now == pytest.approx(done.t_finished)


def test_a_request_in_flight_goes_on_under_new_weights() -> None:
    clock, updates = Clock(), []
    engine = sleeping_engine(clock, updated=lambda weights, seconds: updates.append((weights.policy_version, seconds)))
    engine.submit(requests(2), SAMPLING)
    # No token is sampled under version 0.
    engine.update_weights(weights(1))
    clock.sleep(0.105)
    engine.update_weights(weights(2))
    clock.sleep(100.0)
    assert {done.response.version_spans for done in engine.collect(0.0)} == {((1, 0), (2, 10))}
    assert updates == [(1, 0.0), (2, pytest.approx(2 * 0.105))]


def test_an_interrupted_request_is_continued_with_only_the_rest_to_sample() -> None:
    clock = Clock()
    engine = sleeping_engine(clock, slots=1)
    request, in_line = requests(2)
    engine.submit([request, in_line], SAMPLING)
    clock.sleep(0.105)
    cut, unstarted = engine.interrupt()
    assert engine.in_flight == 0
    assert len(cut.response.tokens) == 10
    assert (cut.response.finish_reason, unstarted.response.tokens) == ("unfinished", ())
    engine.submit([replace(request, response_tokens=cut.response.tokens, seed=77)], SAMPLING)
    (rest,) = engine.collect(100.0)
    assert len(rest.response.tokens) == PACE.num_tokens(0, 0) - 10
    assert rest.t_finished - rest.t_started == pytest.approx(len(rest.response.tokens) * PACE.seconds_per_token)


# ---- the meter ----

METERED_PACE = SleepingPace(sigma=1.0, mean_tokens=20.0, seconds_per_token=0.0, slots=4)
ENDLESS = SleepingPace(sigma=0.0, mean_tokens=1e6, seconds_per_token=0.001, slots=4)


def metered() -> tuple[MeteredEngine, list[MeterReading]]:
    readings: list[MeterReading] = []
    inner = SleepingEngine(ENDLESS, vocab_size=9, eos_token_id=2, updated=lambda *_: None)
    return MeteredEngine(inner, METERED_PACE, readings.append), readings


def test_each_response_has_its_set_length_or_the_limit() -> None:
    engine, readings = metered()
    engine.submit(requests(12), replace(SAMPLING, max_new_tokens=30))
    done = []
    while engine.in_flight:
        done += engine.collect(1.0)
    lengths = {trajectory.request.group_id: len(trajectory.response.tokens) for trajectory in done}
    assert lengths == {i: min(30, METERED_PACE.num_tokens(i, i % 2)) for i in range(12)}
    assert 30 in lengths.values()
    assert min(lengths.values()) < 10
    assert 0 < readings[0].tokens <= sum(lengths.values())


def test_the_meter_counts_updates_and_the_time_of_responses() -> None:
    engine, readings = metered()
    engine.submit(requests(1), replace(SAMPLING, max_new_tokens=1))
    engine.update_weights(weights(7))
    assert engine.policy_version == 7
    engine.collect(1.0)
    assert readings[0].updates == 1
    assert readings[0].response_seconds == pytest.approx(ENDLESS.seconds_per_token, rel=0.01)


def test_readings_outside_the_window_do_not_count() -> None:
    def reading(seconds: float, tokens: float) -> MeterReading:
        """An engine with 8 requests in flight, 5 % of the time for updates, 10 % outside, and two busy cores."""
        return MeterReading(
            t=1000.0 + seconds,
            tokens=tokens,
            updates=seconds // 2,
            response_seconds=8 * seconds,
            update_seconds=0.05 * seconds,
            probe_seconds=0.0,
            outside_seconds=0.1 * seconds,
            cpu_seconds=2 * seconds,
        )

    steady = [reading(seconds, tokens=100 * seconds) for seconds in range(10, 21)]
    figures = between([reading(0, 0), *steady, reading(1000, 5000)], first=1000, last=2000)
    assert figures["seconds"] == 10
    assert figures["tokens_per_second"] == 100
    assert figures["updates"] == 5
    assert figures["in_flight"] == 8
    assert figures["cpu_ms_per_token"] == pytest.approx(20)
    assert figures["update_share"] == pytest.approx(0.05)
    assert figures["outside_share"] == pytest.approx(0.1)
