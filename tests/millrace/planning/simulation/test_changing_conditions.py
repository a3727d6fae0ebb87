"""Simulated campaigns whose costs change on the way, and what their steps measure of it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.outcome import Trace
from millrace.planning.simulation.simulate import simulate
from support.planning.exact import EXACT, Alike
from support.planning.scripts import Script, scripts


def traced(script: Script, later: dict[int, Costs], lengths: Alike | None = None, drift: float = 0.0) -> Trace:
    trace = Trace()
    costs = script.costs if lengths is None else EXACT
    simulate(
        script.config,
        costs,
        lengths or script.lengths,
        steps=script.steps,
        warmup=0,
        trace=trace,
        later=later,
        drift=drift,
    )
    return trace


def seconds(trace: Trace, first: int, last: int) -> float:
    """Per step, from version `first` to `last`."""
    return (trace.trained[last - 1].t - trace.trained[first - 1].t) / (last - first)


def test_costs_hold_from_the_version_on_that_they_are_given_for() -> None:
    slow = replace(EXACT, train=lambda tokens, rollouts: 3.0)
    trace = traced(Script(steps=60, max_staleness=4), {20: slow, 40: EXACT}, Alike(40))
    assert [seconds(trace, *ends) for ends in ((10, 20), (20, 40), (40, 60))] == pytest.approx([1.0, 3.0, 1.0])


def test_generators_that_slow_down_hold_the_trainer_up_until_they_are_back() -> None:
    slow = replace(EXACT, decode=lambda requests, tokens: 0.04)
    trace = traced(Script(steps=90, max_staleness=2), {30: slow, 60: EXACT}, Alike(50))
    assert [seconds(trace, *ends) for ends in ((10, 30), (40, 60), (70, 90))] == pytest.approx([1.0, 2.0, 1.0])


@given(scripts(), st.floats(0.01, 20.0))
@settings(max_examples=30, deadline=None)
def test_a_reward_that_is_slow_for_some_steps_loses_no_group(script: Script, score: float) -> None:
    script = replace(script, steps=12)
    trace = traced(script, {3: replace(script.costs, score=score), 8: replace(script.costs, score=0.0)})
    taken = [group for step in trace.trained for group in step.groups + step.dropped]
    assert len(trace.trained) == 12
    assert len(set(taken)) == len(taken)


def test_the_effective_sample_size_falls_with_the_square_of_the_staleness() -> None:
    # A generator that is faster than the trainer is as far ahead as the bound allows.
    for bound in (1, 3):
        trace = traced(Script(steps=30, max_staleness=bound), {}, Alike(10), drift=0.1)
        in_force, reading = trace.readings[-1]
        assert in_force == bound
        assert reading.effective_sample_size == pytest.approx(1 / (1 + 0.1 * bound**2))


def test_readings_say_how_long_trainer_and_generators_waited() -> None:
    trace = traced(Script(steps=40, max_staleness=4), {}, Alike(250))
    _, last = trace.readings[-1]
    assert last.trainer_waited / last.trainer_seconds == pytest.approx(0.6, abs=0.02)
    assert last.generators_waited == pytest.approx(0.0)
    trace = traced(Script(steps=40, max_staleness=4), {}, Alike(40))
    _, last = trace.readings[-1]
    assert last.generators_waited / last.generators_seconds == pytest.approx(0.6, abs=0.05)
    assert last.steps_ready >= 1
