"""The best config on a machine, and why the others lose."""

from typing import Any

import pytest
from support.planning.small_machine import DECODE, TOKENS, TRAIN_TOKEN, SmallMachine

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.candidate import Goal
from millrace.planning.plan import Plan
from millrace.planning.search import least_step_seconds, make_plan, simulator

RUN = simulator(20)


def config(**sections: dict[str, Any]) -> RunConfig:
    values: dict[str, Any] = {
        "training": {"max_steps": 3, "groups_per_step": 16, "max_tokens_per_microbatch": 4096},
        "generation": {"engine": "vllm", "group_size": 4, "max_new_tokens": 128},
        "staleness": {"max_staleness": 2},
        "promotion": {"margin": None},
    }
    return RunConfig.model_validate({name: values.get(name, {}) | sections.get(name, {}) for name in values | sections})


def search(machine: SmallMachine, gpus: int = 8, goal: Goal = "fastest", **sections: dict[str, Any]) -> Plan:
    return make_plan(config(**sections), machine, RUN, gpus=gpus, goal=goal)


def test_the_gpus_go_where_the_work_is() -> None:
    # 6.4 s of a GPU to train; 1 s of one to decode a step's responses, all at once.
    winner = search(SmallMachine()).chosen
    assert (winner.trainer, winner.generators) == ("7 = 7 × TP1", "1 = 1 × TP1")
    assert winner.outcome is not None
    # The trainer is never idle, so a step takes what it trains: 64 rollouts of 101 tokens.
    assert winner.outcome.step_seconds == pytest.approx(64 * 101 * 1e-3 / 7, rel=0.02)
    assert (winner.bottleneck).startswith("trainer-bound: train 100% busy, generate idle")


def test_synchronous_layouts_are_among_the_runners_up() -> None:
    result = search(SmallMachine())
    reasons = {entry.mode: entry.reason for entry in result.entries[1:]}
    assert "× the time per token; stages wait for each other: train idle" in reasons["sync"]
    assert "× the time" in reasons["sync, by turns"]


def test_of_equally_fast_configs_the_freshest_wins() -> None:
    result = search(SmallMachine())
    best = result.chosen.score("fastest")
    alike = [entry for entry in result.simulated if entry.score("fastest") >= 0.98 * best]
    assert len(alike) > 1
    staleness = [entry.outcome.staleness_mean for entry in alike if entry.outcome is not None]
    assert result.chosen.outcome is not None
    assert result.chosen.outcome.staleness_mean <= min(staleness) + 0.05


def test_no_plan_is_staler_than_the_config_asks() -> None:
    result = search(SmallMachine(), staleness={"max_staleness": 1})
    bounds = {entry.config.effective_max_staleness for entry in result.simulated}
    assert max(bounds) == 1


def test_weights_that_travel_for_longer_than_a_step_are_the_bottleneck() -> None:
    # A version takes ten times a step to travel, so the bound alone decides.
    winner = search(SmallMachine(extra={"push": 10.0}), staleness={"max_staleness": 1}).chosen
    assert "bound by weight sync: a version takes 10 s to the generators" in (winner.bottleneck)


def test_a_plan_that_waits_for_scores_names_the_settings_that_help() -> None:
    winner = search(SmallMachine(extra={"score": 10.0})).chosen
    assert winner.bottleneck.startswith("scorer-bound")
    assert {"scoring.workers", "scoring.replicas"} <= set(winner.bottleneck.split())


def test_a_synchronous_config_gets_a_synchronous_plan() -> None:
    result = search(SmallMachine(), pipeline={"mode": "sync"})
    assert {entry.config.pipeline.mode for entry in result.simulated} == {"sync"}


@pytest.mark.slow
def test_cheapest_leaves_gpus_unused_that_fastest_takes() -> None:
    # Ten seconds per step that no GPU makes shorter.
    machine = SmallMachine(extra={"overhead": 10.0})
    fastest, cheapest = search(machine), search(machine, goal="cheapest")
    assert (cheapest.chosen.gpus or 0) < (fastest.chosen.gpus or 0)
    costs = [result.chosen.gpu_hours_per_million_tokens or 0.0 for result in (cheapest, fastest)]
    assert costs[0] < costs[1]


def test_a_trainer_short_of_memory_gets_activation_checkpointing() -> None:
    # 700 GiB on at most 7 ranks of 80.
    result = search(SmallMachine(trainer_gib=700.0))
    assert result.chosen.config.training.activation_checkpointing
    assert result.chosen.memory is not None
    assert result.chosen.memory.fits


def test_a_model_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(InputError):
        search(SmallMachine(generator_gib=1000.0))


def test_one_gpu_is_shared_by_turns() -> None:
    winner = search(SmallMachine(), gpus=1, training={"max_steps": 3, "groups_per_step": 16}).chosen
    assert winner.config.placement.colocated
    assert winner.gpus == 1


@pytest.mark.slow
def test_batches_are_compared_by_trained_tokens() -> None:
    machine = SmallMachine(extra={"overhead": 1.0})
    made = make_plan(config(), machine, RUN, gpus=8, goal="fastest", batches=[64])
    assert made.chosen.config.training.groups_per_step == 64
    assert any("16 groups per step" in entry.reason for entry in made.entries[1:])


def test_a_search_is_deterministic() -> None:
    first, second = search(SmallMachine()), search(SmallMachine())
    assert [entry.to_json() for entry in first.simulated] == [entry.to_json() for entry in second.simulated]


@pytest.mark.parametrize("gpus", [1, 2, 7, 16])
def test_no_layout_takes_more_gpus_than_there_are(gpus: int) -> None:
    result = search(SmallMachine(), gpus=gpus)
    assert max(entry.gpus or 0 for entry in result.simulated) == gpus
    for entry in result.simulated:
        assert entry.config.training.groups_per_step % entry.config.generation.replicas == 0
        assert entry.config.placement.colocated <= (entry.config.pipeline.mode == "sync")


def test_slots_stay_within_the_bound_and_an_engine_limit_follows_them() -> None:
    generation = {"engine": "vllm", "group_size": 4, "max_new_tokens": 128, "engine_args": {"max_num_seqs": 9}}
    for entry in search(SmallMachine(), gpus=2, generation=generation).simulated:
        chosen = entry.config.generation
        assert chosen.engine_args["max_num_seqs"] == chosen.groups_per_batch * 4
        assert chosen.groups_per_batch <= 16 * (entry.config.effective_max_staleness + 1)


@pytest.mark.parametrize(
    ("changes", "extra", "seconds"),
    [
        ({}, {}, TRAIN_TOKEN * 64 * (TOKENS + 1)),
        # With four slots, a generator decodes four responses at once: sixteen times its hundred steps.
        ({"generation": {"groups_per_batch": 1}}, {}, 16 * TOKENS * DECODE),
        ({}, {"push": 60.0}, 60.0 / 3),
        ({"pipeline": {"mode": "sync"}}, {}, TRAIN_TOKEN * 64 * (TOKENS + 1) + TOKENS * DECODE),
    ],
)
def test_the_analytic_bound_is_the_slower_stage_or_their_sum_in_sync_mode(
    changes: dict[str, dict[str, Any]], extra: dict[str, float], seconds: float
) -> None:
    base, machine = config(**changes), SmallMachine(extra=extra)
    least = least_step_seconds(base, machine.costs(base), machine.lengths(base))
    assert least == pytest.approx(seconds)
    assert RUN(base, machine.costs(base), machine.lengths(base)).step_seconds >= 0.99 * least
