"""The data of a run at one moment. Readers create these types, queries read them, and nothing changes them.

store ─► RunReader ─► RunData ─► queries (pure) ─► blocks: charts and tables ─► page, export, Prometheus
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from configs.stored import bounds_admission_only
from millrace.evaluation.promotion import PromotionDecision
from millrace.runs.provenance import Origin
from millrace.runs.record import AttemptEnd

Columns = Mapping[str, npt.NDArray[Any]]
"""A table: column name → read-only array, all of equal length. Null numbers are NaN."""


@dataclass(frozen=True, kw_only=True)
class AttemptInfo:
    """One start of the run's controller."""

    number: int
    t_started: float
    """Unix seconds."""
    first_step: int
    """Policy version at which it started."""
    max_staleness: int
    """The bound in force, policy versions; 0 in sync mode."""
    mode: str
    """async or sync."""
    transport: str
    """Weight transport: shm, direct or store."""
    end: AttemptEnd | None
    """Its end; None while it runs, or if it was killed."""
    promotion: PromotionDecision | None = None
    """Decision of the promotion gate at its end; None without a readable decision."""
    changes: tuple[str, ...] = ()
    """Settings and inputs that differ from the previous attempt, one sentence each."""
    origin: Origin = field(default_factory=Origin)
    """Nearest preset and page in the Prefect UI, as far as recorded."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Data of a run that changes only when it is resumed."""

    run_id: str
    url: str
    attempts: tuple[AttemptInfo, ...]
    """At least one, oldest first."""
    config: Mapping[str, Any]
    """Config of the newest attempt, as JSON."""

    @property
    def max_staleness(self) -> int:
        """The bound in force, policy versions."""
        return self.attempts[-1].max_staleness

    @property
    def bounds_admission_only(self) -> bool:
        """Whether the bound limits admission only, so that a trained token may be older (`staleness.too_old: keep`)."""
        return bounds_admission_only(self.config)


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
    consumed: Columns
    """`storage.schema.CONSUMED` in stream order, without rolled-back rows; `outcome` and `source` as codes."""
    outcomes: tuple[str, ...]
    """Names of the codes in `consumed["outcome"]` (int8); code 0 is `trained`."""
    sources: tuple[str, ...]
    """Names of the codes in `consumed["source"]` (int8), in order of occurrence; `` is that of damaged parts."""
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

    @property
    def trained(self) -> npt.NDArray[np.bool_]:
        """Which rows of `consumed` an optimizer step used."""
        trained: npt.NDArray[np.bool_] = self.consumed["outcome"] == 0
        return trained

    @cached_property
    def by_source(self) -> Mapping[str, "RunData"]:
        """Source of a mixture → its rows, metrics and evaluations alone; empty for a run with one source."""
        names = [name for name in self.sources if name]
        return {name: self._of_source(name) for name in names} if len(names) > 1 else {}

    def _of_source(self, name: str) -> "RunData":
        chosen, suffix, prefix = self.consumed["source"] == self.sources.index(name), f"/{name}", f"{name}/"
        return replace(
            self,
            consumed={column: values[chosen] for column, values in self.consumed.items()},
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
