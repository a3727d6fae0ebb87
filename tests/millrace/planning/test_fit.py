"""Costs of a machine, recovered from runs whose times follow from known ones."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from support.planning.timed_run import Times, write_timed_run
from support.stores.memory import unused_name

from configs.load import load_config
from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.stored import StoredMachine, fit_costs, fit_machine, predict_step_seconds
from storage.stores.base import Store
from storage.stores.memory import MemoryStore

pytestmark = pytest.mark.slow

TIMES = Times()
PRESET = "configs/presets/tiny-cpu.yaml"


def config(*changes: str) -> RunConfig:
    shared = ("generation.group_size=4", "generation.groups_per_batch=4", "training.groups_per_step=8")
    return load_config(PRESET, [*shared, "generation.max_new_tokens=200", *changes])


def length(group: int, sample: int) -> int:
    return min(200, 1 + round(random.Random(f"{group}:{sample}").lognormvariate(2.5, 0.8)))


def run(run_config: RunConfig, steps: int = 40, times: Times = TIMES, **options: float) -> Store:
    store = MemoryStore(unused_name())
    write_timed_run(store, run_config, length, times, steps=steps, **options)
    return store


@pytest.fixture(scope="module")
def stores() -> Sequence[Store]:
    """Runs of two batches and two numbers of places."""
    return [run(config()), run(config("training.groups_per_step=16", "generation.groups_per_batch=8"))]


@pytest.fixture(scope="module")
def machine(stores: Sequence[Store]) -> StoredMachine:
    return fit_machine(stores)


def test_the_costs_of_all_stages_are_recovered(machine: StoredMachine) -> None:
    costs = machine.costs(config())
    for running in (16, 32):
        expected = TIMES.decode_step + TIMES.decode_token * running
        # Prompts enter with nearly every step here, and are counted with the steps.
        assert expected < costs.decode(running, 20 * running) < expected + TIMES.prefill_pass
    for tokens in (600, 2000):
        assert costs.train(tokens, 32) == pytest.approx(TIMES.train_step + TIMES.train_token * tokens, rel=0.1)
    assert costs.handover == pytest.approx(TIMES.handover, rel=0.1)
    assert costs.score == pytest.approx(TIMES.reward + TIMES.score_part / 4, rel=0.25)
    # What a trainer does between steps grows with the batch.
    for groups in (8, 16):
        overhead = machine.costs(config(f"training.groups_per_step={groups}")).overhead
        assert overhead == pytest.approx(TIMES.overhead_rollout * 4 * groups, rel=0.1)
    assert machine.costs(config("scoring.workers=4")).score < costs.score


def test_the_fit_predicts_the_runs_that_it_saw(machine: StoredMachine) -> None:
    for measured in machine.runs:
        assert predict_step_seconds(measured, machine) == pytest.approx(measured.step_seconds, rel=0.05)


def test_a_run_that_the_fit_did_not_see_is_predicted_within_a_tenth(machine: StoredMachine) -> None:
    [unseen] = fit_machine([run(config("generation.groups_per_batch=6"))]).runs
    assert predict_step_seconds(unseen, machine) == pytest.approx(unseen.step_seconds, rel=0.1)


def test_rollouts_without_advantage_cost_a_forward_pass() -> None:
    batch = ("training.groups_per_step=16", "prompts.num_eval=600")
    machine = fit_machine([run(config()), run(config(*batch), pulls=False)])
    forward = TIMES.train_step + TIMES.train_token * 2000 / 3
    assert machine.costs(config(*batch)).train(2000, 64) == pytest.approx(forward, rel=0.15)
    # An entropy term needs a backward pass of every rollout.
    penalized = machine.costs(config(*batch, "training.entropy_coefficient=0.01"))
    assert penalized.train(2000, 64) > 1.5 * forward


def test_lengths_are_those_of_the_stored_groups(machine: StoredMachine) -> None:
    lengths = machine.lengths(config())
    stored = {tuple(length(group, sample) for sample in range(4)) for group in range(1000)}
    for group in range(50):
        prompt, responses = lengths.of_group(group)
        assert prompt == 5
        assert tuple(responses) in stored


def test_work_that_shared_cores_would_be_faster_alone(stores: Sequence[Store], machine: StoredMachine) -> None:
    """The engine and the trainer of these runs are busy at once for some of the time, and the scorer with them."""
    shared = fit_machine(stores, cores=1).costs(config())
    ratio = machine.costs(config()).decode(16, 160) / shared.decode(16, 160)
    assert 1.1 < ratio < 2


@pytest.mark.parametrize(("steps", "options"), [(12, {}), (40, {"span": 1e6})])
def test_a_run_with_too_few_steps_or_logged_times_is_refused(steps: int, options: dict[str, float]) -> None:
    with pytest.raises(InputError):
        fit_machine([run(config(), steps, **options)])


def test_another_batch_than_the_only_one_fitted_is_refused(stores: Sequence[Store]) -> None:
    machine = fit_machine(stores[:1])
    assert machine.costs(config("staleness.max_staleness=4"))
    with pytest.raises(InputError):
        machine.costs(config("training.groups_per_step=16"))


def test_no_cost_is_negative() -> None:
    rng = np.random.default_rng(0)
    columns = np.stack([np.ones(40), rng.uniform(1, 100, 40), rng.uniform(0, 5, 40)], axis=1)
    assert fit_costs(columns, columns @ [0.02, 0.003, 0.5]) == pytest.approx([0.02, 0.003, 0.5])
    costs = fit_costs(columns, columns @ [1.0, 0.01, 0.0] - 0.02 * columns[:, 2])
    assert min(costs) == costs[2] == 0
