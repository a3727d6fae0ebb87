"""The machine of stored runs, by what they measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema import RunConfig
from millrace.planning.fit.fit import FittedMachine
from millrace.planning.search.bounds import work_of
from millrace.planning.search.machine import Assumption
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.lengths import Lengths


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredMachine:
    """Every stage on what it ran on. Memory is no question, and GPUs are not divided."""

    fitted: FittedMachine
    cores_from: str
    """Who says how many CPU cores the stages share."""

    @property
    def name(self) -> str:
        """The runs."""
        return f"the machine of {', '.join(run.url for run in self.fitted.runs)}"

    def allows_trainer_tensor(self, size: int) -> bool:
        """Only what was measured."""
        return size == 1

    def allows_generator_tensor(self, size: int) -> bool:
        """Only what was measured."""
        return size == 1

    def costs(self, config: RunConfig) -> Costs:
        """By the fitted coefficients."""
        return self.fitted.costs(config)

    def lengths(self, config: RunConfig) -> Lengths:
        """The runs' groups, drawn again."""
        return self.fitted.lengths(config)

    def memory(self, config: RunConfig) -> None:
        """Not known, and not asked."""

    def storage(self, config: RunConfig, step_seconds: float) -> None:
        """Not known."""

    def assumptions(self, config: RunConfig) -> Sequence[Assumption]:
        """The runs, their lengths, and what their stages share."""
        work = work_of(self.lengths(config))
        cores = "each stage has devices of its own"
        if self.fitted.cores is not None:
            cores = f"all stages share {self.fitted.cores:g} CPU cores"
        runs = "; ".join(
            f"{run.url}, {len(run.steps.t) - 1} steps of {run.step_seconds:.3g} s" for run in self.fitted.runs
        )
        lengths = f"prompts of {work.prompt:.0f} tokens, responses of {work.response:.0f}, longest {work.longest:.0f}"
        return (
            Assumption(what="durations", value="fitted", source=runs),
            Assumption(what="lengths", value=lengths, source="the same runs"),
            Assumption(what="devices", value=cores, source=self.cores_from),
        )
