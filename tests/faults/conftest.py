"""The seeds of the fault tests: the module's own, unless MILLRACE_FAULT_SEED names one. The fixtures of campaigns."""

import os

import pytest
from support.campaigns.fixtures import environment, millrace, module_millrace, prefect_api

__all__ = ["environment", "millrace", "module_millrace", "prefect_api"]

SEED = "MILLRACE_FAULT_SEED"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives a test with an argument `seed` each of its module's `SEEDS`; the test's id says which.

    Those of its `STORM_SEEDS`, if it has any, are for the storms, marked `faults`.
    """
    if "seed" not in metafunc.fixturenames:
        return
    few, many = metafunc.module.SEEDS, getattr(metafunc.module, "STORM_SEEDS", ())
    if SEED in os.environ:
        few, many = [int(os.environ[SEED])], []
    seeds = [pytest.param(seed, id=f"seed={seed}") for seed in few]
    seeds += [pytest.param(seed, id=f"seed={seed}", marks=pytest.mark.faults) for seed in many]
    metafunc.parametrize("seed", seeds)


@pytest.fixture(autouse=True)
def _say_seed(request: pytest.FixtureRequest) -> None:
    """The output of a test that fails holds what repeats its faults."""
    if "seed" in request.fixturenames:
        print(f"{SEED}={request.getfixturevalue('seed')}")
