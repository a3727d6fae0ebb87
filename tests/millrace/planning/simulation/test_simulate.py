"""The simulation against closed forms, and what holds for every simulated run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.outcome import Outcome, Trace
from millrace.planning.simulation.simulate import simulate
from support.planning.exact import EXACT, Alike
from support.planning.scripts import Script, scripts

from millrace.rollouts.staleness import admission_limit


@dataclass(frozen=True, kw_only=True)
class ByTurns:
    """Groups of two kinds, each (prompt tokens, response tokens)."""

    even: tuple[int, int]
    odd: tuple[int, int]

    def of_group(self, group_id: int) -> tuple[int, Sequence[int]]:
        prompt, response = self.odd if group_id % 2 else self.even
        return prompt, [response, response]


def outcome(script: Script, costs: Costs = EXACT, lengths: Alike | None = None, warmup: int = 10) -> Outcome:
    chosen = script.lengths if lengths is None else lengths
    return simulate(script.config, costs, chosen, steps=script.steps, warmup=warmup)


def traced(script: Script) -> Trace:
    trace = Trace()
    simulate(script.config, script.costs, script.lengths, steps=script.steps, warmup=0, trace=trace)
    return trace


@pytest.mark.parametrize(("tokens", "step_seconds"), [(40, 1.0), (250, 2.5)])
def test_an_async_step_takes_as_long_as_the_slower_of_generation_and_training(tokens: int, step_seconds: float) -> None:
    found = outcome(Script(steps=40, max_staleness=4), lengths=Alike(tokens))
    assert found.step_seconds == pytest.approx(step_seconds)
    assert found.tokens_per_second == pytest.approx(4 * tokens / step_seconds)
    assert found.idle["train"] == pytest.approx(1 - 1 / step_seconds)
    assert found.idle["generate"] == pytest.approx(1 - tokens / 100 / step_seconds)


def test_a_sync_step_takes_as_long_as_everything_in_turn() -> None:
    costs = replace(EXACT, score=0.05, handover=0.1, push=0.2, pause=0.3, overhead=0.4, prefill=lambda n: n / 1000)
    found = outcome(Script(steps=40, mode="sync"), costs, Alike(250, prompt_tokens=10))
    # The overhead passes while the next responses are sampled; two groups have a prompt each.
    assert found.step_seconds == pytest.approx(0.2 + 0.3 + 0.02 + 2.5 + 4 * 0.05 + 1.0 + 0.1)
    assert (found.staleness_mean, found.staleness_max, found.dropped_share) == (0, 0, 0)


@pytest.mark.parametrize(("share_prefixes", "prompts"), [(True, 2), (False, 4)])
def test_a_step_computes_the_prompt_of_a_group_once_if_prefixes_are_shared(share_prefixes: bool, prompts: int) -> None:
    config = Script(steps=20).config
    training = config.training.model_copy(update={"share_prefixes": share_prefixes})
    costs = replace(EXACT, train=lambda tokens, rollouts: tokens / 100)
    found = simulate(
        config.model_copy(update={"training": training}), costs, Alike(40, prompt_tokens=30), steps=20, warmup=10
    )
    assert found.step_seconds == pytest.approx((4 * 40 + prompts * 30) / 100)


def test_more_generators_make_a_step_bound_by_generation_faster() -> None:
    one, two = (
        outcome(Script(steps=40, generators=n, groups_per_batch=1), lengths=Alike(700)).step_seconds for n in (1, 2)
    )
    assert (one, two) == (pytest.approx(14.0), pytest.approx(7.0))


def test_a_rate_that_depends_on_the_cache_is_that_of_the_mean_cache() -> None:
    costs = replace(EXACT, decode=lambda requests, tokens: 0.001 * tokens)
    found = outcome(Script(steps=20, mode="sync", groups_per_step=2), costs, Alike(100, prompt_tokens=10))
    # Four requests with 10 to 109 tokens each.
    assert found.step_seconds == pytest.approx(1.0 + 0.001 * 4 * 100 * (10 + 99 / 2), rel=0.01)


def test_an_engine_that_pads_computes_all_requests_as_if_they_were_as_long_as_the_longest_in_flight() -> None:
    costs = replace(EXACT, decode=lambda requests, tokens: 0.001 * tokens, pads=True)
    lengths = ByTurns(even=(10, 100), odd=(310, 20))
    script = Script(mode="sync", groups_per_step=2)
    found = simulate(script.config, costs, lengths, steps=20, warmup=10)
    # Four requests of 310 to 329 tokens, then the two of 30 to 109.
    expected = 0.001 * (4 * 20 * (310 + 19 / 2) + 2 * 80 * (30 + 79 / 2))
    assert found.step_seconds == pytest.approx(1.0 + expected, rel=0.01)


def test_each_time_that_responses_end_holds_their_generator_up() -> None:
    lengths = ByTurns(even=(0, 100), odd=(0, 200))
    script = Script(mode="sync", groups_per_step=2)
    plain, held = (
        simulate(script.config, replace(EXACT, collect=seconds), lengths, steps=20, warmup=10).step_seconds
        for seconds in (0.0, 0.25)
    )
    assert held == pytest.approx(plain + 0.25)


def test_caches_are_computed_again_under_new_weights() -> None:
    costs = replace(EXACT, pause=0.5, prefill=lambda tokens: 0.001 * tokens)
    script = Script(steps=200, max_staleness=4, groups_per_step=1, groups_per_batch=1)
    without = outcome(script, replace(costs, pause=0.0, prefill=lambda tokens: 0.0), Alike(1000)).step_seconds
    assert outcome(script, costs, Alike(1000)).step_seconds > without + 0.5


def test_with_fewer_slots_than_places_requests_wait_in_the_engine() -> None:
    script = Script(steps=40, groups_per_batch=4)
    found = simulate(script.config, EXACT, Alike(250), steps=40, warmup=10, slots=2)
    assert found.step_seconds == pytest.approx(5.0)
    assert found.places_taken == pytest.approx(1.0)


def test_the_slowest_scorer_holds_everything_up() -> None:
    found = outcome(Script(steps=60, scorers=2), replace(EXACT, score=1.5), Alike(40))
    assert found.step_seconds == pytest.approx(4 * 1.5 / 2)
    assert found.idle["score"] == pytest.approx(0.0)


def test_checkpoints_hold_the_trainer_up_every_so_often() -> None:
    script = Script(steps=60)
    config = script.config.model_copy(
        update={"training": script.config.training.model_copy(update={"checkpoint_every": 5})}
    )
    found = simulate(config, replace(EXACT, checkpoint=3.0), Alike(40), steps=60, warmup=10)
    assert found.step_seconds == pytest.approx(1.0 + 3.0 / 5)


@given(scripts())
@settings(max_examples=40, deadline=None)
def test_every_group_is_admitted_once_in_order_and_taken_once(script: Script) -> None:
    trace = traced(script)
    for generator in range(script.generators):
        own = [one.group_id for one in trace.admitted if one.generator == generator]
        assert own == [*range(generator, generator + script.generators * len(own), script.generators)]
    taken = [group for step in trace.trained for group in step.groups + step.dropped]
    assert len(set(taken)) == len(taken)
    assert set(taken) <= {one.group_id for one in trace.admitted}
    assert [(step.policy_version, len(step.groups)) for step in trace.trained] == [
        (version, script.groups_per_step) for version in range(1, script.steps + 1)
    ]


@given(scripts())
@settings(max_examples=40, deadline=None)
def test_no_group_is_admitted_or_trained_beyond_the_bound(script: Script) -> None:
    trace = traced(script)
    num_dropped = sum(len(step.dropped) for step in trace.trained)
    for one in trace.admitted:
        assert one.group_id < admission_limit(
            one.policy_version,
            max_staleness=script.config.effective_max_staleness,
            groups_per_step=script.groups_per_step,
            groups_dropped=num_dropped,
        )
    found = outcome(script, script.costs, warmup=0)
    assert found.staleness_max <= script.config.effective_max_staleness
    if script.mode == "sync" or script.too_old != "mask":
        assert found.masked_token_share == 0
    if script.mode == "sync":
        assert not num_dropped


@given(scripts())
@settings(max_examples=30, deadline=None)
def test_shares_are_between_0_and_1_and_the_same_run_comes_to_the_same(script: Script) -> None:
    found = outcome(script, script.costs, warmup=2)
    shares = [found.dropped_share, found.masked_token_share, found.places_taken, *found.idle.values()]
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in shares)
    assert found == outcome(script, script.costs, warmup=2)


def test_what_is_queued_is_what_arrives_times_how_long_it_waits() -> None:
    # Groups come two at once, every second, and the trainer takes two a second: each waits until the step before ends.
    found = outcome(Script(steps=40, max_staleness=3, groups_per_batch=4), lengths=Alike(100))
    assert found.step_seconds == pytest.approx(1.0)
    assert 0 < found.queued_groups <= 8


def test_no_step_to_count_is_refused() -> None:
    with pytest.raises(ValueError, match="3 steps with 3 of warm-up leave none to count"):
        outcome(Script(steps=3), warmup=3)


def test_a_cost_that_is_no_duration_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decodes \d+ requests in 0\.0 seconds per token"):
        outcome(Script(steps=3), replace(EXACT, decode=lambda requests, tokens: 0.0), warmup=1)


def test_stages_that_share_too_few_cores_are_all_slowed_alike() -> None:
    script = Script(steps=40, max_staleness=4)
    # Generator and trainer are busy all the time, the scorer half of it: two threads, or three, on two cores.
    costs = replace(EXACT, score=0.125)
    assert outcome(script, costs, Alike(100)).step_seconds == pytest.approx(1.0)
    shared = outcome(script, replace(costs, cores=2.0), Alike(100))
    assert shared.step_seconds == pytest.approx(0.5 + 0.5 * 3 / 2)
    assert shared.idle["score"] == pytest.approx(0.5 / 1.25)


@given(scripts())
@settings(max_examples=20, deadline=None)
def test_enough_cores_change_nothing_and_one_core_does_all_work_in_turn(script: Script) -> None:
    alone = outcome(script, script.costs, warmup=1)
    enough = outcome(script, replace(script.costs, cores=8.0), warmup=1)
    assert enough.step_seconds == pytest.approx(alone.step_seconds)
    assert enough.places_taken == pytest.approx(alone.places_taken)
    assert enough.queued_groups == pytest.approx(alone.queued_groups)
    busy = 1 - alone.idle["train"] + script.scorers * (1 - alone.idle["score"])
    busy += script.generators * (1 - alone.idle["generate"])
    one = outcome(script, replace(script.costs, cores=1.0), warmup=1)
    assert one.step_seconds >= max(1.0, busy) * alone.step_seconds * (1 - 1e-9)
    assert (one.staleness_mean, one.dropped_share) == (alone.staleness_mean, alone.dropped_share)
