"""One campaign of sleeping stages, and its figures from what it stored.

║ consumed ║ ─► when each step ended, what was trained or dropped, its age and length ─┐
║ metrics  ║ ─► tokens masked; how long the engine's places were taken ────────────────┴─► figures after the warm-up
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow.compute as pc

from benchmarks.harness import read_rows, run_campaign
from benchmarks.sleeping.generate import PLACE_SECONDS
from benchmarks.sleeping.pace import VARIABLE, LongTail, Pace
from millrace.rollouts.consumed import TRAINED
from storage import layout
from storage.schema import CONSUMED, METRIC

Mode = Literal["drop", "wait", "mask"]
GROUP_SIZE = 4
MEAN_TOKENS = 100
MAX_TOKENS = 4096
"""Forty times the mean: at σ = 1, one response in fifty thousand is longer, and is cut."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One campaign."""

    sigma: float
    """Standard deviation of the logarithm of the lengths."""
    max_staleness: int
    groups_per_step: int
    groups_per_batch: int
    mode: Mode
    """`staleness.too_old`."""

    @property
    def name(self) -> str:
        """The run's name."""
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


_CONFIG: Mapping[str, Any] = {
    "name": "long-tail",
    "model": {"warm_start_steps": 0},
    "prompts": {"num_eval": 1, "digits": 1},
    "promotion": {"margin": None},
}
"""Everything small, so that only the sleeps take long."""


def run_case(case: Case, root: Path, *, step_seconds: float, steps: int) -> Path:
    """Runs the case's campaign in a folder of `root`, unless it ran there to its end already. Returns the folder."""
    config = root / f"{case.name}.json"
    config.write_text(json.dumps(settings(case, root, steps)))
    pace = {VARIABLE: case.pace(step_seconds).to_json()}
    run = root / case.name
    run_campaign(run, config=config, module="benchmarks.sleeping.campaign", environment=pace)
    return run


def settings(case: Case, root: Path, steps: int) -> dict[str, Any]:
    """The config of the case's campaign."""
    return {
        **_CONFIG,
        "generation": {
            "group_size": GROUP_SIZE,
            "groups_per_batch": case.groups_per_batch,
            "max_new_tokens": MAX_TOKENS,
        },
        "training": {"max_steps": steps, "groups_per_step": case.groups_per_step},
        "staleness": {"max_staleness": case.max_staleness, "too_old": case.mode},
        "storage": {"root": str(root)},
    }


def measured(run: Path, tail: LongTail, *, step_seconds: float, warmup: int) -> dict[str, Any]:
    """The figures of a finished campaign, without its first `warmup` steps."""
    rows = read_rows(run, layout.CONSUMED, CONSUMED)
    rows = rows.filter(pc.field("policy_version") >= warmup)
    t_first, t_last = pc.min_max(rows["t"]).as_py().values()
    seconds = t_last - t_first
    # The rows of the version at which counting begins say when, and belong to the step before.
    rows = rows.filter(pc.field("policy_version") > warmup)
    trained = rows.filter(pc.field("outcome") == TRAINED)
    steps = pc.max(trained["policy_version"]).as_py() - warmup
    tokens, masked = (pc.sum(trained[name]).as_py() for name in ("tokens", "masked_tokens"))
    return {
        "steps": steps,
        "seconds": seconds,
        "share": steps * step_seconds / seconds,
        "dropped_share": 1 - trained.num_rows / rows.num_rows,
        "masked_token_share": masked / tokens,
        "staleness_mean": pc.mean(trained["staleness"]).as_py(),
        "staleness_max": pc.max(trained["staleness"]).as_py(),
        "length_ratio": pc.mean(trained["tokens"]).as_py() / pc.mean(rows["tokens"]).as_py(),
        "loss_share": (tokens - masked) * tail.seconds_per_token / (seconds * tail.places),
        "engine_idle": 1 - _places_taken(run, warmup) / tail.places,
    }


def _places_taken(run: Path, warmup: int) -> float:
    """Mean number of the engine's places that were taken, from the first version that counts to its last."""
    rows = read_rows(run, layout.metrics("generate", 0), METRIC)
    rows = rows.filter((pc.field("name") == PLACE_SECONDS) & (pc.field("policy_version") >= warmup))
    t, place_seconds = rows["t"].to_pylist(), rows["value"].to_pylist()
    return float((place_seconds[-1] - place_seconds[0]) / (t[-1] - t[0]))
