"""Stages that die in the simulation: what is repeated, what it costs, and that no group is lost."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace.planning.simulation.faults import Faults, with_trainer_failures
from millrace.planning.simulation.outcome import Trace
from millrace.planning.simulation.simulate import simulate
from support.planning.exact import EXACT, Alike
from support.planning.scripts import Script, scripts


@given(script=scripts(), mtbf=st.sampled_from([100.0, 1000.0]), recovery=st.sampled_from([0.0, 0.7]))
@settings(max_examples=25, deadline=None)
def test_whatever_generators_do_no_group_is_trained_twice_or_skipped(
    script: Script, mtbf: float, recovery: float
) -> None:
    trace = Trace()
    faults = Faults(generator_mtbf=mtbf, generator_recovery=recovery)
    simulate(script.config, script.costs, script.lengths, steps=script.steps, warmup=0, faults=faults, trace=trace)
    used = [group for step in trace.trained for group in (*step.groups, *step.dropped)]
    assert len(used) == len(set(used))
    begun = {one.group_id for one in trace.admitted}
    assert set(used) <= begun
    for generator in range(script.generators):
        own = {one.group_id for one in trace.admitted if one.generator == generator}
        assert own == {generator + script.generators * place for place in range(len(own))}, "none is left out"


def test_without_failures_nothing_changes() -> None:
    script = Script(steps=30, max_staleness=2)
    plain = simulate(script.config, EXACT, Alike(120), steps=30, warmup=5)
    assert simulate(script.config, EXACT, Alike(120), steps=30, warmup=5, faults=Faults()) == plain


def test_a_generator_s_failures_cost_its_absence_and_what_it_had_begun() -> None:
    script = Script(steps=400, max_staleness=4)
    plain = simulate(script.config, EXACT, Alike(250), steps=400, warmup=10)
    faults = Faults(generator_mtbf=50.0, generator_recovery=5.0)
    found = simulate(script.config, EXACT, Alike(250), steps=400, warmup=10, faults=faults)
    # Generators alone limit this campaign. Half of a response's 2.5 s is lost on average.
    seconds = found.step_seconds * 390
    lost = found.restarts["generate"] * (5.0 + 1.25)
    assert found.restarts["generate"] > 10
    assert seconds == pytest.approx(plain.step_seconds * 390 + lost, rel=0.05)


@pytest.mark.parametrize(("mtbf", "recovery"), [(100.0, 0.0), (40.0, 10.0)])
def test_a_trainer_s_failures_cost_recovery_and_the_steps_since_its_checkpoint(mtbf: float, recovery: float) -> None:
    steps, every = 20_000, 10
    seconds, failures = with_trainer_failures(
        [float(step + 1) for step in range(steps)], every, Faults(trainer_mtbf=mtbf, trainer_recovery=recovery)
    )
    # The time to get through `every` seconds without a failure, if each begins them again.
    expected = (mtbf + recovery) * (math.exp(every / mtbf) - 1) * steps / every
    assert seconds == pytest.approx(expected, rel=0.05)
    assert failures == pytest.approx(expected / (mtbf + recovery), rel=0.1)


def test_a_campaign_whose_trainer_fails_takes_longer_and_says_how_often_it_failed() -> None:
    script = Script(steps=200, max_staleness=1)
    plain = simulate(script.config, EXACT, Alike(50), steps=200, warmup=0)
    faults = Faults(trainer_mtbf=60.0, trainer_recovery=3.0, seed=1)
    found = simulate(script.config, EXACT, Alike(50), steps=200, warmup=0, faults=faults)
    assert found.restarts["train"] > 0
    assert found.step_seconds > plain.step_seconds
    assert found.tokens_per_second * found.step_seconds == pytest.approx(plain.tokens_per_second * plain.step_seconds)


@pytest.mark.slow
def test_a_generator_that_never_finishes_a_response_is_refused() -> None:
    script = Script(steps=5, max_staleness=1)
    with pytest.raises(ValueError, match="finishes no response: the campaign got no further than version 0"):
        simulate(script.config, EXACT, Alike(2000), steps=5, warmup=0, faults=Faults(generator_mtbf=0.1))


def test_a_trainer_that_never_reaches_a_checkpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="gets no further than version 0"):
        with_trainer_failures([1000.0 * (step + 1) for step in range(50)], 50, Faults(trainer_mtbf=1.0))
