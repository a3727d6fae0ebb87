"""The metered engine and the arithmetic of the comparison; the engines themselves are measured by hand."""

from dataclasses import replace

import pytest

from benchmarks.engine_share.__main__ import between
from benchmarks.engine_share.metered import MeteredEngine, Reading
from benchmarks.sleeping.engines import LongTailEngine
from benchmarks.sleeping.pace import LongTail
from millrace.types import Request, Sampling
from millrace.weights.base import Manifest, Weights, WeightsId

TAIL = LongTail(sigma=1.0, mean_tokens=20.0, seconds_per_token=0.0, places=4)
ENDLESS = LongTail(sigma=0.0, mean_tokens=1e6, seconds_per_token=0.001, places=4)
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=30)


def metered() -> tuple[MeteredEngine, list[Reading]]:
    readings: list[Reading] = []
    inner = LongTailEngine(ENDLESS, vocab_size=9, eos_token_id=2, updated=lambda *_: None)
    return MeteredEngine(inner, TAIL, readings.append), readings


def reading(seconds: float, tokens: float) -> Reading:
    """Of an engine with 8 requests in flight, with 5 % of the time for updates, 10 % outside, and two busy cores."""
    return Reading(
        t=1000.0 + seconds,
        tokens=tokens,
        updates=seconds // 2,
        response_seconds=8 * seconds,
        update_seconds=0.05 * seconds,
        probe_seconds=0.0,
        outside_seconds=0.1 * seconds,
        cpu_seconds=2 * seconds,
    )


def test_each_response_has_the_length_of_its_place_or_the_limit() -> None:
    engine, readings = metered()
    requests = [Request(group_id=i, sample_index=i % 2, prompt_tokens=(1,), seed=i) for i in range(12)]
    engine.submit(requests, SAMPLING)
    done = []
    while engine.in_flight:
        done += engine.collect(1.0)
    lengths = {one.request.group_id: len(one.response.tokens) for one in done}
    assert lengths == {i: min(30, TAIL.tokens(i, i % 2)) for i in range(12)}
    assert 30 in lengths.values()
    assert min(lengths.values()) < 10
    assert 0 < readings[0].tokens <= sum(lengths.values())


def test_the_meter_counts_updates_and_the_time_of_responses() -> None:
    engine, readings = metered()
    engine.submit(
        [Request(group_id=0, sample_index=0, prompt_tokens=(1,), seed=0)], replace(SAMPLING, max_new_tokens=1)
    )
    manifest = Manifest(id=WeightsId(incarnation=0, policy_version=7, t_offered=0.0))
    engine.update_weights(Weights(manifest=manifest, tensors={}))
    assert engine.policy_version == 7
    engine.collect(1.0)
    assert readings[0].updates == 1
    assert readings[0].response_seconds == pytest.approx(ENDLESS.seconds_per_token, rel=0.01)


def test_what_lies_outside_the_window_counts_for_nothing() -> None:
    steady = [reading(seconds, tokens=100 * seconds) for seconds in range(10, 21)]
    found = between([reading(0, 0), *steady, reading(1000, 5000)], first=1000, last=2000)
    assert found["seconds"] == 10
    assert found["tokens_per_second"] == 100
    assert found["updates"] == 5
    assert found["in_flight"] == 8
    assert found["cpu_ms_per_token"] == pytest.approx(20)
    assert found["update_share"] == pytest.approx(0.05)
    assert found["outside_share"] == pytest.approx(0.1)
