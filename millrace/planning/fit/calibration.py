"""The last step of a fit: what the runs themselves say of their own prediction.

    runs' configs ─► costs ─► simulation ─► step time ─┐
    runs ─► measured step time ────────────────────────┴─► one factor for all coefficients

It stands for what no coefficient does: other processes of the machine, threads of a stage that hold each other up.
"""

import math
from collections.abc import Sequence

from millrace.planning.fit.coefficients import Coefficients
from millrace.planning.fit.read import MeasuredRun
from millrace.planning.simulation.outcome import Outcome
from millrace.planning.simulation.simulate import simulate

_STEPS, _WARMUP = 100, 10
"""Of a simulation."""
_ROUNDS = 2


def calibrated(coefficients: Coefficients, runs: Sequence[MeasuredRun], cores: float | None) -> Coefficients:
    """Coefficients with which steps of the runs take as long as they took, in the geometric mean over the runs."""
    for _ in range(_ROUNDS):
        logs = [math.log(run.step_seconds / predicted(run, coefficients, cores).step_seconds) for run in runs]
        coefficients = coefficients.scaled(math.exp(sum(logs) / len(logs)))
    return coefficients


def predicted(run: MeasuredRun, coefficients: Coefficients, cores: float | None) -> Outcome:
    """A run, simulated with its own lengths."""
    costs = coefficients.costs(run.config, pulling=run.pulling_share, reward=None, cores=cores)
    return simulate(run.config, costs, run.lengths(), steps=_STEPS, warmup=_WARMUP)
