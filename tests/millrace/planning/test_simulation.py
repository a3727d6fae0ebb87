"""The simulation against closed forms, and what holds for every simulated run."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from support.planning.scripts import Script, scripts
from support.planning.small_machine import EXACT

from millrace.planning.durations import Costs, Lengths
from millrace.planning.simulation import Outcome, simulate


class ByTurns(Lengths):
    """Groups of some kinds in turn, each (prompt tokens, response tokens)."""

    def __init__(self, *kinds: tuple[int, int]) -> None:
        groups = [(prompt, [response, response]) for prompt, response in kinds]
        super().__init__(groups=groups, group_size=2, max_tokens=10**9)

    def of_group(self, group_id: int) -> tuple[int, Sequence[int]]:
        return self.groups[group_id % len(self.groups)]


def alike(tokens: int, prompt: int = 0) -> ByTurns:
    """Groups of one length."""
    return ByTurns((prompt, tokens))


def outcome(script: Script, costs: Costs = EXACT, lengths: ByTurns | None = None, warmup: int = 10) -> Outcome:
    chosen = script.lengths if lengths is None else lengths
    return simulate(script.config, costs, chosen, steps=script.steps, warmup=warmup)


@pytest.mark.parametrize(("tokens", "step_seconds"), [(40, 1.0), (250, 2.5)])
def test_an_async_step_takes_as_long_as_the_slower_stage(tokens: int, step_seconds: float) -> None:
    result = outcome(Script(steps=40, max_staleness=4), lengths=alike(tokens))
    assert result.step_seconds == pytest.approx(step_seconds)
    assert result.tokens_per_second == pytest.approx(4 * tokens / step_seconds)
    assert result.idle["train"] == pytest.approx(1 - 1 / step_seconds)
    assert result.idle["generate"] == pytest.approx(1 - tokens / 100 / step_seconds)


def test_a_sync_step_takes_as_long_as_everything_in_turn() -> None:
    costs = replace(EXACT, score=0.05, handover=0.1, push=0.2, pause=0.3, overhead=0.4, prefill=lambda n: n / 1000)
    result = outcome(Script(steps=40, mode="sync"), costs, alike(250, prompt=10))
    # The overhead passes while the next responses are sampled; two groups have a prompt each.
    assert result.step_seconds == pytest.approx(0.2 + 0.3 + 0.02 + 2.5 + 4 * 0.05 + 1.0 + 0.1)
    assert (result.staleness_mean, result.staleness_max, result.dropped_share) == (0, 0, 0)


@pytest.mark.parametrize(("share_prefixes", "prompts"), [(True, 2), (False, 4)])
def test_a_step_computes_shared_prefixes_once_per_group(share_prefixes: bool, prompts: int) -> None:
    config = Script(steps=20).config
    training = config.training.model_copy(update={"share_prefixes": share_prefixes})
    costs = replace(EXACT, train=lambda tokens, rollouts: tokens / 100)
    config = config.model_copy(update={"training": training})
    result = simulate(config, costs, alike(40, prompt=30), steps=20, warmup=10)
    assert result.step_seconds == pytest.approx((4 * 40 + prompts * 30) / 100)


def test_more_generators_make_a_step_bound_by_generation_faster() -> None:
    seconds = [
        outcome(Script(steps=40, generators=n, groups_per_batch=1), lengths=alike(700)).step_seconds for n in (1, 2)
    ]
    assert seconds == pytest.approx([14.0, 7.0])


@pytest.mark.parametrize(
    ("pads", "kinds", "cached"),
    [
        # Four requests with 10 to 109 tokens each.
        (False, [(10, 100)], 4 * 100 * (10 + 99 / 2)),
        # Four requests of 310 to 329 tokens, then the two of 30 to 109.
        (True, [(10, 100), (310, 20)], 4 * 20 * (310 + 19 / 2) + 2 * 80 * (30 + 79 / 2)),
    ],
)
def test_the_rate_follows_the_cache_padded_where_the_engine_pads(
    pads: bool, kinds: Sequence[tuple[int, int]], cached: float
) -> None:
    costs = replace(EXACT, decode=lambda requests, tokens: 0.001 * tokens, pads=pads)
    result = outcome(Script(steps=20, mode="sync", groups_per_step=2), costs, ByTurns(*kinds))
    assert result.step_seconds == pytest.approx(1.0 + 0.001 * cached, rel=0.01)


def test_caches_that_are_not_kept_are_recomputed_under_new_weights() -> None:
    kept = Script(steps=200, max_staleness=4, groups_per_step=1, groups_per_batch=1)
    costs = replace(EXACT, pause=0.5, prefill=lambda tokens: 0.001 * tokens)
    without = outcome(kept, EXACT, alike(1000)).step_seconds
    seconds = outcome(kept, costs, alike(1000)).step_seconds
    assert seconds > without
    assert outcome(replace(kept, keep_cache=False), costs, alike(1000)).step_seconds > seconds + 0.1


def test_the_slowest_scorer_holds_everything_up() -> None:
    result = outcome(Script(steps=60, scorers=2), replace(EXACT, score=1.5), alike(40))
    assert result.step_seconds == pytest.approx(4 * 1.5 / 2)
    assert result.idle["score"] == pytest.approx(0.0)


def test_checkpoints_hold_the_trainer_up_every_so_often() -> None:
    result = outcome(Script(steps=60, checkpoint_every=5), replace(EXACT, checkpoint=3.0), alike(40))
    assert result.step_seconds == pytest.approx(1.0 + 3.0 / 5)


def test_stages_that_share_too_few_cores_are_all_slowed_alike() -> None:
    script = Script(steps=40, max_staleness=4)
    # Generator and trainer are busy all the time, the scorer half of it: two threads, or three, on two cores.
    costs = replace(EXACT, score=0.125)
    assert outcome(script, costs, alike(100)).step_seconds == pytest.approx(1.0)
    shared = outcome(script, replace(costs, cores=2.0), alike(100))
    assert shared.step_seconds == pytest.approx(0.5 + 0.5 * 3 / 2)
    assert shared.idle["score"] == pytest.approx(0.5 / 1.25)


@given(scripts())
@settings(max_examples=40, deadline=None)
def test_every_run_keeps_its_bound_and_is_deterministic(script: Script) -> None:
    result = outcome(script, script.costs, warmup=2)
    assert result == outcome(script, script.costs, warmup=2)
    if not script.config.bounds_admission_only:
        assert result.staleness_max <= script.config.effective_max_staleness
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in (result.dropped_share, *result.idle.values()))
    if script.mode == "sync" or script.too_old != "mask":
        assert result.masked_token_share == 0
    if script.mode == "sync" or script.too_old == "keep":
        assert result.dropped_share == 0


@given(scripts())
@settings(max_examples=40, deadline=None)
def test_a_run_that_keeps_old_tokens_trains_everything_within_its_bound_on_average(script: Script) -> None:
    kept = replace(script, mode="async", too_old="keep")
    result = outcome(kept, kept.costs, warmup=0)
    assert (result.dropped_share, result.masked_token_share, result.length_ratio) == (0, 0, pytest.approx(1))
    assert result.staleness_mean <= kept.max_staleness


@given(scripts())
@settings(max_examples=20, deadline=None)
def test_one_core_does_all_work_in_turn(script: Script) -> None:
    alone = outcome(script, script.costs, warmup=1)
    enough = outcome(script, replace(script.costs, cores=8.0), warmup=1)
    assert enough.step_seconds == pytest.approx(alone.step_seconds)
    busy = 1 - alone.idle["train"] + script.scorers * (1 - alone.idle["score"])
    busy += script.generators * (1 - alone.idle["generate"])
    single = outcome(script, replace(script.costs, cores=1.0), warmup=1)
    assert single.step_seconds >= max(1.0, busy) * alone.step_seconds * (1 - 1e-9)
    assert (single.staleness_mean, single.dropped_share) == (alone.staleness_mean, alone.dropped_share)


def test_stored_groups_are_drawn_whole_and_deterministically() -> None:
    groups = [(3, (1, 2)), (5, (8, 9)), (7, (30, 40))]
    lengths = Lengths(groups=groups, group_size=2, max_tokens=35)
    drawn = {(prompt, tuple(responses)) for prompt, responses in map(lengths.of_group, range(100))}
    assert drawn == {(3, (1, 2)), (5, (8, 9)), (7, (30, 35))}
    wider = Lengths(groups=groups, group_size=5, max_tokens=100)
    for number in range(20):
        prompt, responses = wider.of_group(number)
        assert set(responses) <= set(dict(groups)[prompt])
        assert (prompt, responses) == wider.of_group(number)
