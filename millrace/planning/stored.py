"""The machine of stored runs, by what they measured, for configs that it has not run."""

from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.durations import Assumption, Costs, StoredLengths, mean_lengths
from millrace.planning.fit.coefficients import Coefficients, fit_coefficients
from millrace.planning.fit.measured import MeasuredRun, read_measured
from storage.stores.base import Store


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredMachine:
    """Every stage on what it ran on. All fits into memory, and GPUs are not divided."""

    runs: Sequence[MeasuredRun]
    coefficients: Coefficients
    cores: float | None
    """That the stages share; None: each has devices of its own."""
    cores_from: str
    """Who says how many."""

    @property
    def name(self) -> str:
        """The runs."""
        return f"the machine of {', '.join(run.url for run in self.runs)}"

    def allows_trainer_tensor(self, size: int) -> bool:
        """Only what was measured."""
        return size == 1

    def allows_generator_tensor(self, size: int) -> bool:
        """Only what was measured."""
        return size == 1

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

    def lengths(self, config: RunConfig) -> StoredLengths:
        """Lengths of the groups of those runs that ask what `config` asks; of all runs, if none does."""
        return StoredLengths(
            groups=[group for run in self._alike(config) for group in run.groups()],
            group_size=config.generation.group_size,
            max_tokens=config.generation.max_new_tokens,
        )

    def memory(self, config: RunConfig) -> None:
        """All runs fitted."""

    def storage(self, config: RunConfig, step_seconds: float) -> None:
        """Not known."""

    def failures(self, config: RunConfig, step_seconds: float) -> None:
        """Not known."""

    def assumptions(self, config: RunConfig) -> Sequence[Assumption]:
        """The runs, their lengths, and what their stages share."""
        means = mean_lengths(self.lengths(config))
        cores = "each stage has devices of its own"
        if self.cores is not None:
            cores = f"all stages share {self.cores:g} CPU cores"
        runs = "; ".join(f"{run.url}, {len(run.steps.t) - 1} steps of {run.step_seconds:.3g} s" for run in self.runs)
        lengths = (
            f"prompts of {means.prompt:.0f} tokens, responses of {means.response:.0f}, longest {means.longest:.0f}"
        )
        return (
            Assumption(what="durations", value="fitted", source=runs),
            Assumption(what="lengths", value=lengths, source="the same runs"),
            Assumption(what="devices", value=cores, source=self.cores_from),
        )

    def _alike(self, config: RunConfig) -> Sequence[MeasuredRun]:
        return [run for run in self.runs if run.config.prompts == config.prompts] or self.runs


def fit_machine(stores: Sequence[Store], *, cores: float | None = None, cores_from: str = "") -> StoredMachine:
    """Fits one run or more of one machine and model. `cores`: CPU cores that their stages shared, None if none.

    Raises InputError for a run that is too short, RunMissing and StreamCorrupt.
    """
    runs = [read_measured(store) for store in stores]
    coefficients = fit_coefficients(runs, cores)
    return StoredMachine(runs=runs, coefficients=coefficients, cores=cores, cores_from=cores_from)


def _batch(config: RunConfig) -> int:
    return config.training.groups_per_step * config.generation.group_size
