"""What the planner expects of the fixed bounds of a study: seconds per step, fitted to two of its campaigns."""

from collections.abc import Mapping
from pathlib import Path

from millrace.planning.fit.fit import fit_runs
from millrace.planning.fit.read import read_measured
from millrace.planning.simulation.simulate import simulate
from storage.stores.factory import open_store

_STEPS, _WARMUP = 200, 10
"""Of a simulation."""


def predicted_seconds_per_step(runs: Mapping[int, Path], cores: int | None) -> dict[int, float]:
    """For each bound, from its finished campaign's config. `runs` are folders by bound, of one task, loss and seed.

    `cores` are what all stages share; None: each has devices of its own. The costs are fitted to the campaigns of the
    lowest and the highest bound; the others are predictions alone.
    """
    fitted = fit_runs([open_store(str(runs[bound])) for bound in (min(runs), max(runs))], cores=cores)
    configs = {bound: read_measured(open_store(str(run))).config for bound, run in runs.items()}
    return {
        bound: simulate(config, fitted.costs(config), fitted.lengths(config), steps=_STEPS, warmup=_WARMUP).step_seconds
        for bound, config in configs.items()
    }
