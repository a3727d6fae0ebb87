"""From stored runs to a cost model of their machine, for configs that it has not run.

runs ─► measured ─┬─► steps of engines, spans of trainer and scorers ─► coefficients ─► costs of a config
                  └─► groups ─► lengths
"""

from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.fit.calibration import calibrated, predicted
from millrace.planning.fit.coefficients import Coefficients
from millrace.planning.fit.lengths import StoredLengths
from millrace.planning.fit.read import MeasuredRun, read_measured
from millrace.planning.fit.stages import fit_coefficients
from millrace.planning.simulation.costs import Costs
from storage.stores.base import Store


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedMachine:
    """A machine, as some runs on it have shown it."""

    runs: Sequence[MeasuredRun]
    coefficients: Coefficients
    cores: float | None
    """That the stages share; None: each has devices of its own."""

    def costs(self, config: RunConfig, *, reward_seconds: float | None = None) -> Costs:
        """Durations under a config of the same model. `reward_seconds`: those of another reward, per rollout.

        Raises InputError if the runs all have one batch, and this config another one.
        """
        batches = {_batch(run.config) for run in self.runs}
        if len(batches) == 1 and _batch(config) not in batches:
            raise InputError(
                f"a step of the config has {_batch(config)} rollouts, but all runs fitted have {min(batches)}: "
                "how its time depends on that number takes one more run, of another batch"
            )
        alike = self._alike(config)
        pulling = 1.0
        if not config.training.pulls_without_advantage:
            pulling = sum(run.pulling_share for run in alike) / len(alike)
        return self.coefficients.costs(config, pulling=pulling, reward=reward_seconds, cores=self.cores)

    def step_ratios(self) -> list[float]:
        """The fit's own error: predicted ÷ measured step time of each run that it was fitted on."""
        return [predicted(run, self.coefficients, self.cores).step_seconds / run.step_seconds for run in self.runs]

    def lengths(self, config: RunConfig, seed: int = 0) -> StoredLengths:
        """Lengths of the groups of those runs that ask what `config` asks; of all runs, if none does."""
        return StoredLengths(
            groups=[group for run in self._alike(config) for group in run.groups()],
            group_size=config.generation.group_size,
            max_tokens=config.generation.max_new_tokens,
            seed=seed,
        )

    def _alike(self, config: RunConfig) -> Sequence[MeasuredRun]:
        return [run for run in self.runs if run.config.prompts == config.prompts] or self.runs


def fit_runs(stores: Sequence[Store], *, cores: float | None = None) -> FittedMachine:
    """Fits one run or more of one machine and model. `cores`: CPU cores that their stages shared, None if none.

    Raises InputError for a run that is too short, RunMissing and StreamCorrupt.
    """
    runs = [read_measured(store) for store in stores]
    coefficients = calibrated(fit_coefficients(runs, cores), runs, cores)
    return FittedMachine(runs=runs, coefficients=coefficients, cores=cores)


def _batch(config: RunConfig) -> int:
    return config.training.groups_per_step * config.generation.group_size
