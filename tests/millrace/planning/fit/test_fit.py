"""Coefficients of a machine, recovered from runs whose times follow from known ones."""

import random
from collections.abc import Sequence

import pytest
from millrace.planning.fit.fit import FittedMachine, fit_runs
from support.planning.timed_run import Times, write_timed_run
from support.stores.memory import unused_name

from configs.load import load_config
from configs.schema import RunConfig
from millrace.errors import InputError
from storage.stores.base import Store
from storage.stores.memory import MemoryStore

pytestmark = pytest.mark.slow

_TIMES = Times()
_PRESET = "configs/presets/tiny-cpu.yaml"


def _config(*changes: str) -> RunConfig:
    shared = ("generation.group_size=4", "generation.groups_per_batch=4", "training.groups_per_step=8")
    return load_config(_PRESET, [*shared, "generation.max_new_tokens=200", *changes])


def _length(group: int, sample: int) -> int:
    return min(200, 1 + round(random.Random(f"{group}:{sample}").lognormvariate(2.5, 0.8)))


def _run(config: RunConfig, steps: int = 40, *, pulls: bool = True) -> Store:
    store = MemoryStore(unused_name())
    write_timed_run(store, config, _length, _TIMES, steps=steps, pulls=pulls)
    return store


@pytest.fixture(scope="module")
def stores() -> Sequence[Store]:
    """Runs of two batches and two numbers of places."""
    return [_run(_config()), _run(_config("training.groups_per_step=16", "generation.groups_per_batch=8"))]


@pytest.fixture(scope="module")
def machine(stores: Sequence[Store]) -> FittedMachine:
    """Fitted on these runs."""
    return fit_runs(stores)


def test_the_cost_of_an_engines_step_is_recovered(machine: FittedMachine) -> None:
    costs = machine.costs(_config())
    for running in (1, 8, 16, 32):
        expected = _TIMES.decode_step + _TIMES.decode_token * running
        assert costs.decode(running, 10 * running) == pytest.approx(expected, rel=0.03)
    assert costs.prefill(5) == pytest.approx(_TIMES.prefill_pass, rel=0.05)


def test_the_cost_of_a_training_step_is_recovered(machine: FittedMachine) -> None:
    costs = machine.costs(_config())
    for tokens in (200, 600, 2000):
        expected = _TIMES.train_step + _TIMES.train_token * tokens
        assert costs.train(tokens, 32) == pytest.approx(expected, rel=0.03)
    assert costs.handover == pytest.approx(_TIMES.handover, rel=0.05)


def test_rollouts_without_advantage_cost_a_forward_pass_where_runs_that_ask_the_same_had_none() -> None:
    batch = ("training.groups_per_step=16", "prompts.num_eval=600")
    machine = fit_runs([_run(_config()), _run(_config(*batch), pulls=False)])
    for tokens in (600, 2000):
        both = _TIMES.train_step + _TIMES.train_token * tokens
        assert machine.costs(_config()).train(tokens, 32) == pytest.approx(both, rel=0.03)
        forward = _TIMES.train_step + _TIMES.train_token * tokens / 3
        assert machine.costs(_config(*batch)).train(tokens, 32) == pytest.approx(forward, rel=0.03)
    penalized = _config(*batch, "training.entropy_coefficient=0.01")
    assert machine.costs(penalized).train(600, 32) == machine.costs(_config()).train(600, 32)


def test_what_a_trainer_does_between_steps_grows_with_the_batch(machine: FittedMachine) -> None:
    for groups in (4, 8, 32):
        costs = machine.costs(_config(f"training.groups_per_step={groups}"))
        assert costs.overhead == pytest.approx(_TIMES.overhead_rollout * 4 * groups, rel=0.1)


def test_the_cost_of_scoring_is_recovered(machine: FittedMachine) -> None:
    costs = machine.costs(_config())
    assert costs.score == pytest.approx(_TIMES.reward, rel=0.1)
    assert costs.score_part == pytest.approx(_TIMES.score_part, rel=0.1)


def test_another_reward_replaces_the_measured_one(machine: FittedMachine) -> None:
    assert machine.costs(_config(), reward_seconds=0.5).score == pytest.approx(0.5, rel=0.01)
    workers = _config("scoring.workers=4")
    assert machine.costs(workers, reward_seconds=0.5).score == pytest.approx(0.125, rel=0.01)


def test_lengths_are_those_of_the_stored_groups(machine: FittedMachine) -> None:
    lengths = machine.lengths(_config())
    stored = {tuple(_length(group, sample) for sample in range(4)) for group in range(1000)}
    for group in range(50):
        prompt, responses = lengths.of_group(group)
        assert prompt == 5
        assert tuple(responses) in stored


def test_work_that_shared_cores_would_be_faster_alone(stores: Sequence[Store], machine: FittedMachine) -> None:
    """The engine and the trainer of these runs are busy at once for some of the time, and the scorer with them."""
    shared = fit_runs(stores, cores=1).costs(_config())
    ratio = machine.costs(_config()).decode(16, 160) / shared.decode(16, 160)
    assert 1.1 < ratio < 2
    enough = fit_runs(stores, cores=3).costs(_config())
    assert enough.decode(16, 160) == pytest.approx(machine.costs(_config()).decode(16, 160))


def test_a_run_that_is_too_short_is_refused_with_what_is_missing() -> None:
    with pytest.raises(InputError, match=r"has 12 steps, 7 after a warm-up of 5; a fit needs 20, so 13 more$"):
        fit_runs([_run(_config(), steps=12)])


def test_a_run_whose_stages_logged_too_little_is_refused() -> None:
    store = MemoryStore(unused_name())
    write_timed_run(store, _config(), _length, Times(train_step=0.0001), steps=40, span=1e6)
    with pytest.raises(InputError, match=r"generate 0 logged its times 0 times after the warm-up; a fit needs 2, so 2"):
        fit_runs([store])


def test_another_batch_than_the_only_one_fitted_is_refused(stores: Sequence[Store]) -> None:
    machine = fit_runs(stores[:1])
    assert machine.costs(_config("staleness.max_staleness=4"))
    with pytest.raises(InputError, match="a step of the config has 64 rollouts, but all runs fitted have 32: "):
        machine.costs(_config("training.groups_per_step=16"))


def test_the_fit_knows_its_own_error(machine: FittedMachine) -> None:
    assert machine.step_ratios() == pytest.approx([1.0, 1.0], abs=0.05)


def test_a_config_of_another_mode_needs_no_other_run(machine: FittedMachine) -> None:
    def decode(changes: Sequence[str]) -> float:
        return machine.costs(_config(*changes)).decode(8, 80)

    assert decode(["pipeline.mode=sync"]) == decode([])
