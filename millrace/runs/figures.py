"""Figures of a run that its status, its pages and its plan share: staleness, plan against measurement, bottleneck."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from millrace.rollouts.ledger import Account

PLAN_NAMES = {
    "step_seconds": "seconds per step",
    "tokens_per_second": "tokens per second",
    "staleness_mean": "staleness",
    "dropped_share": "share dropped",
}
"""Display names of the keys of the config's section `plan`."""
_BUSY = 0.1
"""A stage that is idle for less of the time is the bottleneck."""
_PUSH_SHARE = 0.5
"""Weights that travel for more of a step are the bottleneck if no stage is."""
_BOUND = {"train": "trainer-bound", "generate": "generator-bound", "score": "scorer-bound"}


def staleness_trained(account: Account) -> dict[str, Any]:
    """Staleness of the trained trajectories, policy versions: histogram, mean and maximum."""
    histogram = account.staleness
    total = histogram.total()
    return {
        "histogram": {str(staleness): count for staleness, count in sorted(histogram.items())},
        "mean": sum(staleness * count for staleness, count in histogram.items()) / total if total else None,
        "max": max(histogram, default=None),
    }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure of a plan, and its measurement."""

    name: str
    """Its key in the config's section `plan`, which documents its unit."""
    planned: float
    measured: float | None
    """None: not measured yet."""

    @property
    def ratio(self) -> float | None:
        """Measured ÷ planned; None if either is missing or nothing was planned, such as a staleness of 0."""
        return self.measured / self.planned if self.measured is not None and self.planned else None

    def to_json(self) -> dict[str, float | None]:
        return {"planned": self.planned, "measured": self.measured, "ratio": self.ratio}


def measured_against_plan(
    config: Mapping[str, Any], trainer: Mapping[str, Any], account: Account, staleness_mean: float | None
) -> tuple[Comparison, ...]:
    """The figures that the plan in `config` (JSON) predicts; none if it has no plan.

    `trainer` is the trainer's status record. `staleness_mean` and the dropped share are those of the whole run.
    Rolled-back trajectories do not count as dropped: their prompts are asked again.
    """
    rolled_back = account.dropped.get("rolled_back")
    taken = account.taken().rollouts - (0 if rolled_back is None else rolled_back.rollouts)
    measured = {
        "step_seconds": trainer.get("step_seconds"),
        "tokens_per_second": trainer.get("tokens_per_second"),
        "staleness_mean": staleness_mean,
        "dropped_share": 1 - account.trained.rollouts / taken if taken else None,
    }
    plan = config.get("plan", {})
    planned = {name: plan[name] for name in measured if plan.get(name) is not None}
    return tuple(Comparison(name=name, planned=value, measured=measured[name]) for name, value in planned.items())


class Bottleneck(NamedTuple):
    stage: str | None
    """`train`, `generate`, `score` or `sync_weights`; None if stages wait for each other."""
    sentence: str
    """With idle shares: "trainer-bound: train 99% busy, generate idle 44%"."""


def find_bottleneck(
    idle: Mapping[str, float], *, sync: bool, step_seconds: float | None = None, push: float = 0.0
) -> Bottleneck:
    """The bottleneck of stages that are `idle` for these shares of the time; a stage that is missing counts as idle.

    `push`: seconds that a version travels to the generators.
    """
    stage = min(_BOUND, key=lambda name: idle.get(name, 1.0))
    shares = {name: f"{name} idle {idle.get(name, 1.0):.0%}" for name in ("train", "generate")}
    if idle.get(stage, 1.0) <= _BUSY:
        idle_shares = ", ".join(share for name, share in shares.items() if name != stage)
        return Bottleneck(stage, f"{_BOUND[stage]}: {stage} {1 - idle[stage]:.0%} busy, {idle_shares}")
    both = ", ".join(shares.values())
    travelling = f"a version takes {push:.3g} s to the generators"
    if sync:
        return Bottleneck(None, f"stages wait for each other: {both}{f'; {travelling}' if push else ''}")
    if step_seconds is not None and push > _PUSH_SHARE * step_seconds:
        return Bottleneck("sync_weights", f"bound by weight sync: {travelling}; {both}")
    waits = "generators wait for the staleness bound or for long responses"
    return Bottleneck(None, f"no stage is always busy: {both}; {waits}")
