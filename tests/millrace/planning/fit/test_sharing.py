"""How much slower stages get on shared cores."""

from dataclasses import replace

import pytest
from millrace.planning.fit.sharing import Load, expected_slowdown
from millrace.planning.simulation.lengths import LogNormalLengths
from millrace.planning.simulation.simulate import simulate
from support.planning.exact import EXACT

from configs.load import load_config


def _loads(*shares: float, threads: int = 1) -> list[Load]:
    return [Load(stage="score", share=share, threads=threads) for share in shares]


def test_stages_with_a_core_each_are_not_slowed() -> None:
    assert expected_slowdown(_loads(1.0, 1.0, 1.0), 0, cores=3) == 1


def test_stages_that_are_always_busy_divide_the_cores() -> None:
    assert expected_slowdown(_loads(1.0, 1.0, 1.0), 0, cores=2) == 1.5
    assert expected_slowdown(_loads(1.0, 1.0, threads=4), 0, cores=2) == 4


def test_a_stage_slows_others_only_while_it_is_busy() -> None:
    # Both others busy: three threads on two cores.
    assert expected_slowdown(_loads(0.1, 0.5, 0.2), 0, cores=2) == pytest.approx(1 + 0.5 * 0.2 * 0.5)


@pytest.mark.slow
def test_stages_that_share_cores_slow_each_other_in_a_simulation() -> None:
    """Generator and trainer, busy all the time, on one core: each step takes what both take one after the other."""
    config = load_config("configs/presets/tiny-cpu.yaml", ["generation.groups_per_batch=64"])
    lengths = LogNormalLengths(prompt_tokens=1, mean_tokens=10, sigma=0.0, max_tokens=10, group_size=8)

    def step_seconds(cores: float | None) -> float:
        costs = replace(EXACT, decode=lambda running, context: 0.1, cores=cores)
        return simulate(config, costs, lengths, steps=60, warmup=10).step_seconds

    assert step_seconds(None) == pytest.approx(1.0, rel=0.01)
    assert step_seconds(2) == pytest.approx(1.0, rel=0.01)
    assert step_seconds(1) == pytest.approx(2.0, rel=0.05)
