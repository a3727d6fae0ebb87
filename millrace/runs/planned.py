"""What a run measured, against what its plan predicted: from the trainer's status record, so no stream is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.rollouts.ledger import Account

PLAN_NAMES = {
    "step_seconds": "seconds per step",
    "tokens_per_second": "tokens per second",
    "staleness_mean": "staleness",
    "dropped_share": "share dropped",
}
"""What to call the keys of the config's section `plan`."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure of a plan."""

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
        """Both values and their ratio."""
        return {"planned": self.planned, "measured": self.measured, "ratio": self.ratio}


def measured_against_plan(
    config: Mapping[str, Any], trainer: Mapping[str, Any], account: Account, staleness_mean: float | None
) -> tuple[Comparison, ...]:
    """The figures that the plan in `config` (JSON) predicts; none if it has no plan.

    `trainer` is the trainer's status record. `staleness_mean` and the dropped share are those of the whole run.
    Rolled-back trajectories do not count as dropped: their prompts are asked again.
    """
    taken, rolled_back = account.taken().rollouts, account.dropped.get("rolled_back")
    taken -= 0 if rolled_back is None else rolled_back.rollouts
    measured: dict[str, float | None] = {
        "step_seconds": trainer.get("step_seconds"),
        "tokens_per_second": trainer.get("tokens_per_second"),
        "staleness_mean": staleness_mean,
        "dropped_share": 1 - account.trained.rollouts / taken if taken else None,
    }
    planned = config.get("plan", {})
    return tuple(
        Comparison(name=name, planned=planned[name], measured=value)
        for name, value in measured.items()
        if planned.get(name) is not None
    )
