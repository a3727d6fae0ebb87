"""What is known of a run at one moment: the nouns that the readers fill, the queries read and nobody changes.

store ─► reading.RunReader ─► RunData ─► queries (pure) ─► blocks: charts and tables ─► page, export, Prometheus
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Columns = Mapping[str, npt.NDArray[Any]]
"""A table: arrays of one length by column name, read-only. A null number is NaN."""


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """One start of the run's controller."""

    number: int
    t_started: float
    """Unix seconds."""
    first_step: int
    """Policy version it went on from."""
    max_staleness: int
    """The bound in force, policy versions; 0 in sync mode."""
    mode: str
    """async or sync."""
    transport: str
    """How weights travel: shm, broadcast or store."""
    ended: str | None
    """finished or stopped; None while it runs, and where it was killed."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What does not change from one look to the next, except when the run is resumed."""

    run_id: str
    url: str
    attempts: tuple[AttemptFacts, ...]
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

    facts: RunFacts
    t: float
    """When it was looked at, unix seconds."""
    status: Mapping[str, Any] | None
    """What `millrace.status.StatusReader.look` says, plain JSON; None where it can't be said: see `problems`."""
    lives: Mapping[str, Mapping[str, Any]]
    """Signs of life by `<stage>-<replica>`."""
    consumed: Columns
    """`storage.schema.CONSUMED`, in stream order, without what was rolled back; `outcome` as codes, see below."""
    outcomes: tuple[str, ...]
    """What the codes in `consumed["outcome"]` (int8) stand for; code 0 is `trained`."""
    metrics: Mapping[str, Mapping[str, Columns]]
    """`<stage>-<replica>` → name → columns t, incarnation, policy_version, value; the trainer's without what was rolled
    back."""
    evaluations: Columns
    """Held-out results by version, ascending: policy_version, accuracy, num_prompts."""
    problems: tuple[str, ...] = field(default=())
    """What could not be read, a sentence each: file, record and what is wrong."""

    @property
    def trained(self) -> npt.NDArray[np.bool_]:
        """Which rows of `consumed` an optimizer step used."""
        trained: npt.NDArray[np.bool_] = self.consumed["outcome"] == 0
        return trained
