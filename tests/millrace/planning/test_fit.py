"""Coefficients of a machine, recovered from runs whose times follow from known ones."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from support.planning.timed_run import Times, write_timed_run
from support.stores.memory import unused_name

from configs.load import load_config
from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.fit.coefficients import expected_slowdown, fit_costs, predicted_step_seconds
from millrace.planning.stored import StoredMachine, fit_machine
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
def machine(stores: Sequence[Store]) -> StoredMachine:
    """Fitted on these runs."""
    return fit_machine(stores)


def test_the_costs_of_all_stages_are_recovered(machine: StoredMachine) -> None:
    costs = machine.costs(_config())
    for running in (1, 8, 16, 32):
        expected = _TIMES.decode_step + _TIMES.decode_token * running
        assert costs.decode(running, 10 * running) == pytest.approx(expected, rel=0.03)
    assert costs.prefill(5) == pytest.approx(_TIMES.prefill_pass, rel=0.05)
    for tokens in (200, 600, 2000):
        assert costs.train(tokens, 32) == pytest.approx(_TIMES.train_step + _TIMES.train_token * tokens, rel=0.03)
    assert costs.handover == pytest.approx(_TIMES.handover, rel=0.05)
    assert costs.score == pytest.approx(_TIMES.reward, rel=0.1)
    assert costs.score_part == pytest.approx(_TIMES.score_part, rel=0.1)
    # What a trainer does between steps grows with the batch.
    for groups in (4, 8, 32):
        overhead = machine.costs(_config(f"training.groups_per_step={groups}")).overhead
        assert overhead == pytest.approx(_TIMES.overhead_rollout * 4 * groups, rel=0.1)
    # Another reward replaces the measured one.
    workers = _config("scoring.workers=4")
    assert machine.costs(workers, reward_seconds=0.5).score == pytest.approx(0.125, rel=0.01)


def test_rollouts_without_advantage_cost_a_forward_pass() -> None:
    batch = ("training.groups_per_step=16", "prompts.num_eval=600")
    machine = fit_machine([_run(_config()), _run(_config(*batch), pulls=False)])
    for tokens in (600, 2000):
        both = _TIMES.train_step + _TIMES.train_token * tokens
        assert machine.costs(_config()).train(tokens, 32) == pytest.approx(both, rel=0.03)
        forward = _TIMES.train_step + _TIMES.train_token * tokens / 3
        assert machine.costs(_config(*batch)).train(tokens, 32) == pytest.approx(forward, rel=0.03)
    penalized = _config(*batch, "training.entropy_coefficient=0.01")
    assert machine.costs(penalized).train(600, 32) == machine.costs(_config()).train(600, 32)


def test_lengths_are_those_of_the_stored_groups(machine: StoredMachine) -> None:
    lengths = machine.lengths(_config())
    stored = {tuple(_length(group, sample) for sample in range(4)) for group in range(1000)}
    for group in range(50):
        prompt, responses = lengths.of_group(group)
        assert prompt == 5
        assert tuple(responses) in stored


def test_work_that_shared_cores_would_be_faster_alone(stores: Sequence[Store], machine: StoredMachine) -> None:
    """The engine and the trainer of these runs are busy at once for some of the time, and the scorer with them."""
    shared = fit_machine(stores, cores=1).costs(_config())
    ratio = machine.costs(_config()).decode(16, 160) / shared.decode(16, 160)
    assert 1.1 < ratio < 2
    enough = fit_machine(stores, cores=3).costs(_config())
    assert enough.decode(16, 160) == pytest.approx(machine.costs(_config()).decode(16, 160))


def test_a_run_that_is_too_short_is_refused_with_what_is_missing() -> None:
    with pytest.raises(InputError):
        fit_machine([_run(_config(), steps=12)])


def test_a_run_whose_stages_logged_too_little_is_refused() -> None:
    store = MemoryStore(unused_name())
    write_timed_run(store, _config(), _length, Times(train_step=0.0001), steps=40, span=1e6)
    with pytest.raises(InputError):
        fit_machine([store])


def test_another_batch_than_the_only_one_fitted_is_refused(stores: Sequence[Store]) -> None:
    machine = fit_machine(stores[:1])
    assert machine.costs(_config("staleness.max_staleness=4"))
    with pytest.raises(InputError):
        machine.costs(_config("training.groups_per_step=16"))


def test_the_fit_predicts_the_runs_that_it_saw(machine: StoredMachine) -> None:
    for run in machine.runs:
        predicted = predicted_step_seconds(run, machine.coefficients, machine.cores)
        assert predicted == pytest.approx(run.step_seconds, rel=0.05)


def _columns(rows: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.stack([np.ones(rows), rng.uniform(1, 100, rows), rng.uniform(0, 5, rows)], axis=1)


def test_a_few_outliers_change_little_but_their_own_sum() -> None:
    columns = _columns(400)
    seconds = columns @ np.array([0.02, 0.003, 0.5])
    assert fit_costs(columns, seconds) == pytest.approx([0.02, 0.003, 0.5])
    seconds[::100] += 30
    costs = fit_costs(columns, seconds)
    assert (columns @ costs).sum() == pytest.approx(seconds.sum())
    assert costs[2] / costs[1] == pytest.approx(0.5 / 0.003, rel=0.05)


def test_no_cost_is_negative() -> None:
    columns = _columns(40)
    costs = fit_costs(columns, columns @ [1.0, 0.01, 0.0] - 0.02 * columns[:, 2])
    assert (costs >= 0).all()
    assert costs[2] == 0


@pytest.mark.parametrize(
    ("threads", "others", "cores", "slowdown"),
    [
        (1, [(1, 1.0), (1, 1.0)], 3, 1),
        (1, [(1, 1.0), (1, 1.0)], 2, 1.5),
        (4, [(4, 1.0)], 2, 4),
        # Both others busy: three threads on two cores.
        (1, [(1, 0.5), (1, 0.2)], 2, 1 + 0.5 * 0.2 * 0.5),
    ],
)
def test_a_process_is_slowed_by_others_while_they_are_busy(
    threads: int, others: list[tuple[int, float]], cores: float, slowdown: float
) -> None:
    assert expected_slowdown(threads, others, cores) == pytest.approx(slowdown)
