"""Everything known of a run at one moment. Readers fill these types, queries read them, nothing changes them.

store ─► RunReader ─► RunData ─► queries (pure) ─► blocks: charts and tables ─► page, export, Prometheus
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.evaluation.promotion import Decision
from millrace.runs.provenance import Origin
from millrace.runs.record import AttemptEnd

Columns = Mapping[str, npt.NDArray[Any]]
"""A table: arrays of one length by column name, read-only. A null number is NaN."""


@dataclass(frozen=True, kw_only=True)
class AttemptInfo:
    """One start of the run's controller."""

    number: int
    t_started: float
    """Unix seconds."""
    first_step: int
    """Policy version it resumed from."""
    max_staleness: int
    """The bound in force, policy versions; 0 in sync mode."""
    mode: str
    """async or sync."""
    transport: str
    """How weights travel: shm, direct or store."""
    end: AttemptEnd | None
    """How it ended; None while it runs, and if it was killed."""
    promotion: Decision | None = None
    """What the promotion gate decided at its end; None if it did not get that far, or that can't be read."""
    changes: tuple[str, ...] = ()
    """Settings and inputs that differ from those of the attempt before it, a sentence each."""
    origin: Origin = field(default_factory=Origin)
    """Its nearest preset, and its page in the Prefect UI, as far as they were recorded."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What changes only when the run is resumed."""

    run_id: str
    url: str
    attempts: tuple[AttemptInfo, ...]
    """At least one, oldest first."""
    config: Mapping[str, Any]
    """Of the newest attempt, as JSON."""

    @property
    def max_staleness(self) -> int:
        """The bound in force, policy versions."""
        return self.attempts[-1].max_staleness


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run as it was at time `t`."""

    info: RunInfo
    t: float
    """When it was read, unix seconds."""
    status: Mapping[str, Any] | None
    """`millrace.runs.status.StatusReader.look`, plain JSON; None if it can't be computed: see `problems`."""
    stage_status: Mapping[str, Mapping[str, Any]]
    """Status records by `<stage>-<replica>`."""
    consumed: Columns
    """`storage.schema.CONSUMED`, in stream order, without rows that were rolled back; `outcome` as codes."""
    outcomes: tuple[str, ...]
    """Names of the codes in `consumed["outcome"]` (int8); code 0 is `trained`."""
    metrics: Mapping[str, Mapping[str, Columns]]
    """`<stage>-<replica>` → name → columns t, incarnation, policy_version, value; the trainer's without rows that were
    rolled back."""
    evaluations: Columns
    """Held-out results by version, ascending: policy_version, accuracy, the ends of its 95 % interval accuracy_low and
    accuracy_high (NaN if unknown), num_prompts, t (unix seconds, when it ended),
    seconds (that it took; NaN if unknown)."""
    evaluation_sets: Mapping[str, Columns] = field(default_factory=dict)
    """The same of each further evaluation set, by its name."""
    problems: tuple[str, ...] = ()
    """What could not be read, one sentence each: file, record and what is wrong."""

    @property
    def trained(self) -> npt.NDArray[np.bool_]:
        """Which rows of `consumed` an optimizer step used."""
        trained: npt.NDArray[np.bool_] = self.consumed["outcome"] == 0
        return trained
