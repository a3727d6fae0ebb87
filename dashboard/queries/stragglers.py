"""Groups in flight, and the bias of trained responses towards some lengths and rewards.

status records of the generators ─► work in flight
metrics of the trainer           ─► mean length and reward, trained ÷ taken
"""

from dataclasses import dataclass

import numpy as np

from dashboard.queries.series import TRAINER, metric
from dashboard.read.model import RunData
from millrace.rollouts.length_bias import HIGH, LOW, STEPS
from millrace.runtime.messages import LOADING, STARTING, STOPPED

BAND = (LOW, HIGH)
"""Range of trained ÷ taken length that counts as unbiased."""


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A generator's work in flight; values are None if it has none or is not running."""

    generator: int
    requests: int | None
    groups: int | None
    """Groups admitted and not yet committed."""
    tokens: int
    """Response tokens generated so far; of a drained generator, the tokens it stored."""
    seconds: float | None
    """Age of the oldest group."""
    versions: int | None
    """Policy versions between the trainer and the oldest weights that may have sampled a token of these groups."""
    loses_tokens: bool
    """Whether the oldest group is beyond the bound, so that the trainer masks or drops some of it."""
    continued: int
    """Response tokens continued from earlier processes, in the whole run."""
    discarded: int
    """Response tokens lost with earlier processes and generated again, in the whole run."""


def in_flight(run: RunData) -> list[InFlight]:
    """Returns the work in flight by generator, as far as status records contain it."""
    generators = []
    for name, status in run.stage_status.items():
        stage, _, replica = name.rpartition("-")
        if stage != "generate" or "requests_in_flight" not in status:
            continue
        state = "" if run.status is None else run.status["state"]
        at_work = state == "running" and status["doing"] not in (STARTING, LOADING, STOPPED)
        oldest, t_oldest = status.get("oldest_version_in_flight"), status.get("t_oldest_in_flight")
        version = run.stage_status.get(TRAINER, {}).get("policy_version")
        versions = max(0, version - oldest) if at_work and version is not None and oldest is not None else None
        is_beyond = versions is not None and versions > run.info.max_staleness
        generators.append(
            InFlight(
                generator=int(replica),
                requests=status["requests_in_flight"] if at_work else None,
                groups=status["groups_in_flight"] if at_work else None,
                tokens=status["tokens_in_flight"],
                seconds=max(0.0, run.t - t_oldest) if at_work and t_oldest is not None else None,
                versions=versions,
                loses_tokens=is_beyond and not run.info.bounds_admission_only,
                continued=status.get("tokens_continued", 0),
                discarded=status.get("tokens_discarded", 0),
            )
        )
    return sorted(generators, key=lambda work: work.generator)


def biased_length(run: RunData) -> float | None:
    """Returns trained ÷ taken length at the last step if it is outside the band; None in an attempt's first steps."""
    rows = metric(run, TRAINER, "length_ratio")
    if np.count_nonzero(rows["incarnation"] == rows["incarnation"][-1:]) < STEPS:
        return None
    ratio = float(rows["value"][-1])
    return ratio if ratio < BAND[0] or ratio > BAND[1] else None
