"""The data of a run at one moment. Readers create these types, queries read them, and nothing changes them.

store ─► RunReader ─► RunData ─► queries (pure) ─► blocks: charts and tables ─► page, export, Prometheus
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from configs.stored import bounds_admission_only, is_supervised
from millrace.evaluation.promotion import PromotionDecision
from millrace.rollouts.ledger import Account, Amount
from millrace.runs.record import Attempt, AttemptEnd, State

_SHORT = {"effective_sample_size": "ess"}
Columns = Mapping[str, npt.NDArray[Any]]
"""A table: column name → read-only array, all of equal length. Null numbers are NaN."""


@dataclass(frozen=True, kw_only=True)
class AttemptInfo(Attempt):
    """One start of the run's controller, with its end."""

    end: AttemptEnd | None = None
    """None while it runs, or if it was killed."""
    promotion: PromotionDecision | None = None
    """Decision of the promotion gate at its end; None without a readable decision."""

    @property
    def mode(self) -> str:
        """async or sync."""
        return str(self.config["pipeline"]["mode"])

    @property
    def transport(self) -> str:
        """Weight transport: shm, direct or store."""
        return str(self.config["weights"]["transport"])


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Data of a run that changes only when it is resumed."""

    run_id: str
    url: str
    attempts: tuple[AttemptInfo, ...]
    """At least one, oldest first."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Config of the newest attempt, as JSON."""
        return self.attempts[-1].config

    @property
    def max_staleness(self) -> int:
        """The bound in force, policy versions."""
        return self.attempts[-1].max_staleness

    @property
    def is_supervised(self) -> bool:
        """Whether it learns demonstrations, which no policy sampled."""
        return is_supervised(self.config)

    @property
    def bounds_admission_only(self) -> bool:
        """Whether the bound limits admission only, so that a trained token may be older (`staleness.too_old: keep`)."""
        return bounds_admission_only(self.config)


@dataclass(frozen=True, kw_only=True)
class Recent:
    """Figures of the last ten steps and of the whole run; None if unknown.

    The table of all runs and a run's own pages show these figures, so that they agree.
    """

    state: State | None = None
    cause: str | None = None
    """Cause of a failure or kill."""
    max_staleness: int | None = None
    """The bound in force, policy versions."""
    is_supervised: bool = False
    """Whether it learns demonstrations, which no policy sampled."""
    reward_mean: float | None = None
    loss: float | None = None
    staleness_mean: float | None = None
    """In policy versions, as the largest of the ten steps."""
    staleness_max: int | None = None
    ess: float | None = None
    """Effective sample size, as a share of the tokens."""
    no_spread: float | None = None
    """Share of the groups of the last ten steps in which all rewards are equal."""
    dropped_share: float | None = None
    """Share of all trajectories taken that were dropped as too old."""
    masked_share: float | None = None
    """Share of all trained tokens that were masked as too old."""
    collapse: str | None = None
    """Sentence of an ongoing collapse."""

    @classmethod
    def values(cls, info: RunInfo, trainer: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields by name, except state and cause, from the trainer's status record.

        Raises any error if that is damaged.
        """
        recent: Mapping[str, Sequence[float]] = trainer.get("recent", {})
        account = Account.from_json(trainer["account"]) if "account" in trainer else Account()
        return {
            "max_staleness": info.max_staleness,
            "is_supervised": info.is_supervised,
            **{_SHORT.get(name, name): fmean(values) for name, values in recent.items()},
            "staleness_max": int(max(recent["staleness_max"])) if "staleness_max" in recent else None,
            "no_spread": trainer.get("zero_advantage_share"),
            "dropped_share": account.dropped.get("stale", Amount()).rollouts / max(1, account.taken().rollouts),
            "masked_share": account.masked.tokens / max(1, account.trained.tokens),
            "collapse": trainer.get("collapse"),
        }


class Consumed(dict[str, npt.NDArray[Any]]):
    """Rows of the stream `consumed` in its order, without rolled-back ones: columns of `storage.schema.CONSUMED`.

    `outcome`, `source` and `prompt_id` are codes, here with their names. Outcome 0 is `trained`; other codes are in
    order of occurrence, and the source and the prompt of damaged parts are named ``.
    """

    def __init__(
        self, columns: Columns, *, outcomes: tuple[str, ...], sources: tuple[str, ...], prompts: tuple[str, ...]
    ) -> None:
        super().__init__(columns)
        self.outcomes, self.sources, self.prompts = outcomes, sources, prompts

    def place(self, index: int) -> tuple[int, int]:
        """Returns generator and row_id of the trajectory at an index."""
        return int(self["generator"][index]), int(self["trajectory_row_id"][index])


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run as it was at time `t`."""

    info: RunInfo
    t: float
    """Time of reading, unix seconds."""
    status: Mapping[str, Any] | None
    """`millrace.runs.status.StatusReader.look`, plain JSON; None if it can't be computed: see `problems`."""
    stage_status: Mapping[str, Mapping[str, Any]]
    """`<stage>-<replica>` → status record."""
    recent: Consumed
    """The rows of `consumed` of the newest ten versions."""
    read_consumed: Callable[[], Consumed]
    """Reads all rows of `consumed`: much time and memory in a long run, so only where a page needs them."""
    metrics: Mapping[str, Mapping[str, Columns]]
    """`<stage>-<replica>` → name → columns t, incarnation, policy_version, value; the trainer's without
    rolled-back rows."""
    evaluations: Columns
    """Held-out results by ascending version: policy_version, accuracy, its 95 % interval accuracy_low and accuracy_high
    (NaN if unknown), num_prompts, t (end, unix seconds), seconds (duration, NaN if unknown)."""
    evaluation_sets: Mapping[str, Columns] = field(default_factory=dict)
    """Name of a further evaluation set → its results."""
    problems: tuple[str, ...] = ()
    """Read errors, one sentence each: file, record and error."""

    def latest(self, kind: Literal["incidents", "decisions"]) -> Sequence[Mapping[str, Any]]:
        """Returns the latest incidents or decisions of the status, oldest first."""
        latest: Sequence[Mapping[str, Any]] = (self.status or {}).get(kind, {}).get("latest", ())
        return latest

    @cached_property
    def consumed(self) -> Consumed:
        return self.read_consumed()

    @property
    def trained(self) -> npt.NDArray[np.bool_]:
        """Which rows of `consumed` an optimizer step used."""
        trained: npt.NDArray[np.bool_] = self.consumed["outcome"] == 0
        return trained

    @cached_property
    def by_source(self) -> Mapping[str, "RunData"]:
        """Source of a mixture → its rows, metrics and evaluations alone; empty for a run with one source."""
        names = dict.fromkeys(name for attempt in self.info.attempts for name in attempt.config.get("sources", {}))
        return {name: self._of_source(name) for name in names} if len(names) > 1 else {}

    def _of_source(self, name: str) -> "RunData":
        suffix, prefix = f"/{name}", f"{name}/"

        def of_source() -> Consumed:
            every = self.consumed
            chosen = every["source"] == [*every.sources, name].index(name)
            columns = {column: values[chosen] for column, values in every.items()}
            return Consumed(columns, outcomes=every.outcomes, sources=every.sources, prompts=every.prompts)

        return replace(
            self,
            read_consumed=of_source,
            metrics={
                replica: {key.removesuffix(suffix): rows for key, rows in by_name.items() if key.endswith(suffix)}
                for replica, by_name in self.metrics.items()
            },
            evaluations=self.evaluation_sets.get(name, {key: values[:0] for key, values in self.evaluations.items()}),
            evaluation_sets={
                key.removeprefix(prefix): columns
                for key, columns in self.evaluation_sets.items()
                if key.startswith(prefix)
            },
        )


@dataclass(frozen=True, kw_only=True)
class OverviewRow(Recent):
    """A run in the overview. Unknown values are None; with a `problem`, all are unknown."""

    run_id: str
    problem: str | None = None
    """One sentence if the run can't be read: it is being created, or damaged."""
    policy_version: int | None = None
    """Newest version of the trainer."""
    max_steps: int | None = None
    """Policy version at which the run is complete."""
    rewards: Sequence[tuple[int, float]] = ()
    """(version, mean reward) of at most 64 steps, ascending."""
    ages: Mapping[str, float] = field(default_factory=dict)
    """Stage → age of its oldest status record, seconds."""
    t_started: float | None = None
    """First start, unix seconds."""
    wall_seconds: float | None = None
    """Time in which an attempt ran, up to the last sign of life."""
    accuracy: float | None = None
    """Held-out accuracy of the newest evaluated version."""
    accuracy_interval: tuple[float | None, float | None] | None = None
    """Lower and upper end of its 95 % interval, if it has one."""
    accuracy_version: int | None = None
    idle: Mapping[str, float] = field(default_factory=dict)
    """Stage → share of its time without work, without loading."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Config of the newest attempt, see `dashboard.read.run_reader.settings`."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Content hash of each input of the newest attempt, by name."""
    note: str = ""
    accuracies: Sequence[tuple[int, float]] = ()
    """(version, held-out accuracy) of each evaluated version, ascending."""
    missing: Sequence[str] = ()
    """Other read errors, one sentence each."""
