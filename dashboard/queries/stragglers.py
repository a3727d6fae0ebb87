"""What waits for whom: the groups in flight, how many overtook them, and whether what is trained is biased by that.

status records of the generators ─► what is in flight now
metrics of the trainer           ─► mean length and reward, trained ÷ taken
"""

from dataclasses import dataclass

import numpy as np

from dashboard.queries.learning import TRAINER
from dashboard.queries.series import metric
from dashboard.read.model import RunData
from millrace.rollouts.length_bias import HIGH, LOW, STEPS
from millrace.runtime.messages import LOADING, STARTING, STOPPED

BAND = (LOW, HIGH)
"""Within this, responses that are trained are as long as all that were taken."""


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """What a generator is working on. None: nothing is in flight, or it is not at work."""

    generator: int
    requests: int | None
    groups: int | None
    """Admitted, and not committed yet."""
    tokens: int
    """Response tokens they have so far; of a generator that was drained, those that it stored."""
    seconds: float | None
    """Since the oldest group was admitted."""
    versions: int | None
    """How far the trainer is ahead of the oldest weights that may have sampled a token of these groups."""
    bound: int
    """The largest staleness allowed, policy versions."""
    continued: int
    """Response tokens that it took over from earlier processes, in the whole run."""
    discarded: int
    """Response tokens that were lost with earlier processes and had to be generated again, in the whole run."""

    @property
    def beyond_bound(self) -> bool:
        return self.versions is not None and self.versions > self.bound


@dataclass(frozen=True, kw_only=True)
class Bias:
    """The mean of what was trained over that of all that was taken, dropped groups included: 1 without bias."""

    name: str
    """length or reward."""
    last: float
    """As of the last step."""
    mean: float
    """Over all steps; NaN if no step has it."""
    lowest: float
    highest: float
    outside: int
    """Steps at which it was outside the band."""
    steps: int
    """Steps that have it."""


def in_flight(run: RunData) -> list[InFlight]:
    """By generator; without those whose status record does not say."""
    generators = []
    for name, status in run.stage_status.items():
        stage, _, replica = name.rpartition("-")
        if stage != "generate" or "requests_in_flight" not in status:
            continue
        state = "" if run.status is None else run.status["state"]
        at_work = state == "running" and status["doing"] not in (STARTING, LOADING, STOPPED)
        oldest, t_oldest = status.get("oldest_version_in_flight"), status.get("t_oldest_in_flight")
        version = run.stage_status.get(TRAINER, {}).get("policy_version")
        generators.append(
            InFlight(
                generator=int(replica),
                requests=status["requests_in_flight"] if at_work else None,
                groups=status["groups_in_flight"] if at_work else None,
                tokens=status["tokens_in_flight"],
                seconds=max(0.0, run.t - t_oldest) if at_work and t_oldest is not None else None,
                versions=max(0, version - oldest) if at_work and version is not None and oldest is not None else None,
                bound=run.info.max_staleness,
                continued=status.get("tokens_continued", 0),
                discarded=status.get("tokens_discarded", 0),
            )
        )
    return sorted(generators, key=lambda work: work.generator)


def biases(run: RunData) -> list[Bias]:
    """Of the length and of the reward, as far as the trainer measures them."""
    result = []
    for name in ("length", "reward"):
        ratios = metric(run, TRAINER, f"{name}_ratio")["value"]
        finite = ratios[np.isfinite(ratios)]
        if len(finite):
            result.append(
                Bias(
                    name=name,
                    last=float(ratios[-1]),
                    mean=float(finite.mean()),
                    lowest=float(finite.min()),
                    highest=float(finite.max()),
                    outside=int(np.count_nonzero((finite < BAND[0]) | (finite > BAND[1]))),
                    steps=len(finite),
                )
            )
    return result


def biased_length(run: RunData) -> float | None:
    """Mean length, trained ÷ taken, as of the last step, if that is outside the band. None too in the first steps."""
    rows = metric(run, TRAINER, "length_ratio")
    if np.count_nonzero(rows["incarnation"] == rows["incarnation"][-1:]) < STEPS:
        return None
    ratio = float(rows["value"][-1])
    return ratio if ratio < BAND[0] or ratio > BAND[1] else None
