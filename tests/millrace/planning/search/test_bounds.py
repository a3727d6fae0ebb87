"""The analytic bound that ranks candidates: no simulation is faster."""

from typing import Any

import pytest
from millrace.planning.search.bounds import least_step_seconds, work_of
from millrace.planning.search.search import simulating
from millrace.planning.simulation.lengths import LogNormalLengths
from support.planning.small_machine import DECODE, TOKENS, TRAIN_TOKEN, SmallMachine

from configs.schema import RunConfig

ROLLOUTS = 8 * 4


def config(**generation: Any) -> RunConfig:
    values = {"group_size": 4, "groups_per_batch": 8, "max_new_tokens": 128}
    return RunConfig.model_validate(
        {"training": {"max_steps": 3, "groups_per_step": 8}, "generation": values | generation}
    )


def least(machine: SmallMachine, config: RunConfig) -> float:
    return least_step_seconds(config, machine.costs(config), work_of(machine.lengths(config)))


def test_a_step_takes_what_the_slower_stage_takes() -> None:
    assert least(SmallMachine(), config()) == pytest.approx(TRAIN_TOKEN * ROLLOUTS * (TOKENS + 1))
    # With four places, a generator decodes four responses at once: eight times its hundred steps.
    assert least(SmallMachine(), config(groups_per_batch=1)) == pytest.approx(8 * TOKENS * DECODE)


def test_a_version_that_travels_long_holds_up_the_steps_that_the_bound_allows() -> None:
    machine = SmallMachine(besides={"push": 50.0})
    assert least(machine, config()) == pytest.approx(50.0 / 5)


def test_synchronous_stages_add_up() -> None:
    sync = config().model_copy(update={"pipeline": config().pipeline.model_copy(update={"mode": "sync"})})
    together = TRAIN_TOKEN * ROLLOUTS * (TOKENS + 1) + TOKENS * DECODE
    assert least(SmallMachine(), sync) == pytest.approx(together)


@pytest.mark.parametrize("generation", [{}, {"groups_per_batch": 1}, {"replicas": 2, "groups_per_batch": 2}])
def test_no_simulation_is_faster_than_the_bound(generation: dict[str, Any]) -> None:
    machine, one = SmallMachine(), config(**generation)
    outcome = simulating(20)(one, machine.costs(one), machine.lengths(one))
    assert outcome.step_seconds >= 0.99 * least(machine, one)


def test_long_responses_are_in_flight_for_longer_than_short_ones() -> None:
    lengths = LogNormalLengths(prompt_tokens=10, mean_tokens=200, sigma=1.0, max_tokens=100_000, group_size=8)
    work = work_of(lengths)
    assert work.context > 10 + 200
    assert work.longest > 5 * work.response
