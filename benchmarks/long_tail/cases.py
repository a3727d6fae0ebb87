"""What the benchmark varies, and the pace of a campaign that follows from it."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.sleeping.pace import LongTail, Pace

Mode = Literal["drop", "wait", "mask"]
GROUP_SIZE = 4
MEAN_TOKENS = 100
MAX_TOKENS = 4096
"""Forty times the mean: at σ = 1, one response in fifty thousand is longer, and is cut."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One campaign."""

    sigma: float
    """Of the logarithm of the lengths."""
    max_staleness: int
    groups_per_step: int
    groups_per_batch: int
    mode: Mode
    """`staleness.too_old`."""

    @property
    def name(self) -> str:
        """Of its run."""
        return (
            f"sigma{self.sigma:g}-eta{self.max_staleness}-B{self.groups_per_step}-C{self.groups_per_batch}-{self.mode}"
        )

    def pace(self, step_seconds: float) -> Pace:
        """Generator and trainer each make a step in `step_seconds`, if nothing holds them up."""
        places = self.groups_per_batch * GROUP_SIZE
        rollouts = self.groups_per_step * GROUP_SIZE
        response_seconds = step_seconds * places / rollouts
        return Pace(
            generate=step_seconds,
            score=0.0,
            train=step_seconds,
            rollouts_per_step=rollouts,
            long_tail=LongTail(
                sigma=self.sigma,
                mean_tokens=MEAN_TOKENS,
                seconds_per_token=response_seconds / MEAN_TOKENS,
                places=places,
            ),
        )


def all_cases(groups: int) -> list[Case]:
    """The table, with `groups` per optimizer step."""
    rows = [(0.3, 4, 1), (0.6, 4, 1), (1.0, 4, 1), (0.6, 4, 2), (1.0, 4, 2), (1.0, 8, 2)]
    modes: tuple[Mode, ...] = ("drop", "wait", "mask")
    return [
        Case(
            sigma=sigma,
            max_staleness=eta,
            groups_per_step=groups,
            groups_per_batch=groups * batches,
            mode=mode,
        )
        for sigma, eta, batches in rows
        for mode in modes
    ]
