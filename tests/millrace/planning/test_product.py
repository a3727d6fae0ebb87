"""Whether the simulation does what the product does: both on the same scripted durations, group by group.

config, costs, lengths ─┬─► the product's own stages, in virtual time ─► admissions, steps ─┐
                        └─► simulate ──────────────────────────────────► admissions, steps ─┴─► the same?
"""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from support.planning.product import run_product
from support.planning.scripts import Script, scripts

from benchmarks.virtual_time.clock import Stuck, VirtualClock
from millrace.planning.simulation.outcome import Trace
from millrace.planning.simulation.simulate import simulate
from millrace.rollouts.staleness import admission_limit, staleness

_MOMENT = 1e-6
"""Seconds: times are sums of rounded numbers."""
_LONG_TAIL = Script(steps=12, generators=3, groups_per_step=6, groups_per_batch=4, max_staleness=1, sigma=1.5)
_TWO_SCORERS = Script(generators=3, scorers=2, groups_per_step=9, groups_per_batch=6, score=0.67)
"""A part is scored before the one before it, which the other scorer has."""
_LONG_PUSH = Script(push=5.0, train=0.2)
"""Some versions are never pushed."""
_OLDER_LATER = Script(
    generators=3, groups_per_step=3, groups_per_batch=1, max_staleness=4, sigma=1.5, seed=2, train=4.0
)
"""A slow generator's groups have lower numbers and younger weights than others that wait beside them."""

_SLOW_REWARD = Script(
    steps=30, control="adaptive", max_staleness=6, scorers=4, score=4.03, sigma=0.4, train=0.9, groups_per_batch=4
)
"""With a bound of 1 both sides wait for scores most of the time."""


def check_that_both_do_the_same(script: Script) -> None:
    """Same groups admitted by each generator under the same versions, same groups in each step, at the same times."""
    product = run_product(script.config, script.costs, script.lengths)
    simulated = Trace()
    simulate(script.config, script.costs, script.lengths, steps=script.steps, warmup=0, trace=simulated)
    end = product.trained[-1].t
    assert [(step.policy_version, step.groups, step.dropped) for step in product.trained] == [
        (step.policy_version, step.groups, step.dropped) for step in simulated.trained
    ]
    assert [step.t for step in product.trained] == pytest.approx([step.t for step in simulated.trained], abs=_MOMENT)
    for generator in range(script.generators):
        # In the moment of the last step the product is being stopped.
        done, expected = (
            [one for one in trace.admitted if one.generator == generator and one.t < end - _MOMENT]
            for trace in (product, simulated)
        )
        assert [(one.group_id, one.policy_version) for one in done] == [
            (one.group_id, one.policy_version) for one in expected
        ]
        assert [one.t for one in done] == pytest.approx([one.t for one in expected], abs=_MOMENT)


@pytest.mark.extended
@example(replace(_LONG_TAIL, too_old="drop"))
@example(replace(_LONG_TAIL, too_old="wait"))
@example(replace(_LONG_TAIL, too_old="mask"))
@example(replace(_LONG_TAIL, mode="sync", too_old="mask"))
@example(_TWO_SCORERS)
@example(_LONG_PUSH)
@example(_OLDER_LATER)
@given(scripts())
@settings(max_examples=15, derandomize=True)
def test_the_simulation_admits_and_trains_the_groups_that_the_product_does(script: Script) -> None:
    check_that_both_do_the_same(script)


@pytest.mark.extended
@pytest.mark.parametrize("too_old", ["drop", "mask"])
@pytest.mark.parametrize("generators", [1, 2])
def test_under_adaptive_control_the_simulation_does_what_the_product_does(generators: int, too_old: str) -> None:
    script = replace(_SLOW_REWARD, generators=generators, too_old=too_old)
    check_that_both_do_the_same(script)
    simulated = Trace()
    simulate(script.config, script.costs, script.lengths, steps=script.steps, warmup=0, trace=simulated)
    bounds = [bound for bound, _ in simulated.readings]
    assert max(bounds) > 1, "a bound of 1 leaves both sides waiting for the reward"


@pytest.mark.extended
@given(scripts())
@settings(max_examples=200)
def test_of_hundreds_of_runs_the_simulation_gets_none_wrong(script: Script) -> None:
    check_that_both_do_the_same(script)


@pytest.mark.slow
@given(scripts())
@settings(max_examples=10)
def test_the_product_in_virtual_time_keeps_its_promises(script: Script) -> None:
    bound = script.config.effective_max_staleness
    trace = run_product(script.config, script.costs, script.lengths)

    admitted = {one.group_id: one for one in trace.admitted}
    assert len(admitted) == len(trace.admitted)
    for generator in range(script.generators):
        own = [one.group_id for one in trace.admitted if one.generator == generator]
        assert own == [generator + script.generators * i for i in range(len(own))]

    assert [step.policy_version for step in trace.trained] == [*range(1, script.steps + 1)]
    taken = [group for step in trace.trained for group in step.groups + step.dropped]
    assert len(set(taken)) == len(taken)
    assert set(taken) <= admitted.keys()
    for step in trace.trained:
        assert len(step.groups) == script.groups_per_step
        if script.mode == "sync":
            assert step.dropped == ()
        if script.too_old != "mask":
            assert all(staleness(step.policy_version - 1, admitted[n].policy_version) <= bound for n in step.groups)

    for one in trace.admitted:
        begun = [step for i, step in enumerate(trace.trained) if i == 0 or trace.trained[i - 1].t <= one.t]
        assert one.group_id < admission_limit(
            one.policy_version,
            max_staleness=bound,
            groups_per_step=script.groups_per_step,
            groups_dropped=sum(len(step.dropped) for step in begun),
        )


def test_the_product_in_virtual_time_does_the_same_every_time() -> None:
    script = Script(generators=2, max_staleness=1, sigma=1.2, groups_per_batch=3)
    first, second = (run_product(script.config, script.costs, script.lengths) for _ in range(2))
    assert first == second
    assert any(step.dropped for step in first.trained)


def test_threads_that_wait_for_each_other_are_told_so() -> None:
    clock = VirtualClock()
    with pytest.raises(Stuck, match=r"at 2\.000 s all threads wait for each other: a, b"):
        clock.run([("a", clock.poll), ("b", lambda: (clock.sleep(2.0), clock.poll())[1])])
