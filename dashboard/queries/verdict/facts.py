"""The facts that the verdict's rules use. Facts that a run did not record are None.

status, status records ─► state, silence, collapse       ┐
trainer's record       ─► staleness, spread, ESS         ├─► Facts
time/<kind>/seconds    ─► idle share by stage            ┘
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dashboard.queries.flow import SYNC, WAITING
from dashboard.queries.series import TRAINER, metric, replicas
from dashboard.queries.stragglers import biased_length
from dashboard.read.model import Recent, RunData
from dashboard.read.runs import idle_shares
from dashboard.read.tokens import visible
from millrace.runs.status import STAGES
from millrace.runtime.messages import STOPPED
from millrace.runtime.metrics import RECENT_STEPS, TIME

IDLE_SECONDS = 120.0
"""Window of the idle shares of a running run."""
_HANG_SECONDS = 120.0
"""Default of `supervision.hang_seconds`."""


@dataclass(frozen=True, kw_only=True)
class Facts(Recent):
    """Input of the verdict's rules."""

    run_url: str
    command: str | None = None
    """Command line that continues the run; None if no command line started it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Config of the newest attempt."""
    version: int = 0
    target: int | None = None
    """Version at which this attempt ends."""
    step_seconds: float | None = None
    """Median duration of the newest steps."""
    doing: Mapping[str, str] = field(default_factory=dict)
    """Replica → last activity."""
    silent: Mapping[str, float] = field(default_factory=dict)
    """Replica that has not stopped → age of its status record, seconds."""
    hang_seconds: float = _HANG_SECONDS
    stalled: str | None = None
    """Sentence of the newest incident, if it is a stall not followed by a step."""
    problems: Sequence[str] = ()
    alarm: str | None = None
    """Sentence of the newest alarm within the newest steps."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Stage replica → restarts in the whole run."""
    length_bias: float | None = None
    """Trained ÷ taken length, if outside its band."""
    idle: Mapping[str, float] = field(default_factory=dict)
    """Stage → share of time spent waiting; of a running run, in the last two minutes."""
    sync: bool = False
    push_seconds: float | None = None
    """Median time from the handover of a recent version until all generators had it."""
    admission_only: bool = False
    ess_target: float = 0.95
    ess_floor: float = 0.5
    best_version: int | None = None
    """Version with the best evaluation; 0 is the base model."""

    def setting(self, key: str) -> Any:
        """Returns a setting by its key, such as `staleness.too_old`; None if it is missing."""
        value: Any = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    @property
    def is_adaptive(self) -> bool:
        """Whether the trainer adapts the staleness bound."""
        return bool(self.setting("staleness.control") == "adaptive")


_ALARMS = (
    "probe.alarm",
    "generator.lost",
    "trainer.rolled-back",
    "selection.starving",
    "reward.failed",
    "service.limit-reached",
    "placement.waiting",
)
"""Kinds of incidents that are alarms while they are recent."""


def read_facts(run: RunData) -> Facts:
    """Reads the current facts of a run."""
    status, config = run.status or {}, run.info.config
    newest = run.info.attempts[-1]
    return Facts(
        **Recent.values(run.info, run.stage_status.get(TRAINER, {})),
        run_url=run.info.url,
        command=None if newest.origin.command is None else visible(newest.origin.command),
        config=config,
        state=status.get("state"),
        cause=status.get("cause"),
        version=int(status.get("steps") or 0),
        target=status.get("stop_at_step") or status.get("max_steps"),
        step_seconds=_step_seconds(run),
        doing=_doing(run),
        silent=_silent(run),
        hang_seconds=float(config.get("supervision", {}).get("hang_seconds", _HANG_SECONDS)),
        stalled=_stalled(run),
        problems=run.problems,
        alarm=_alarm(run),
        restarts=status.get("incidents", {}).get("restarts", {}),
        length_bias=biased_length(run),
        idle=_idle(run),
        sync=newest.mode == "sync",
        push_seconds=_median(metric(run, SYNC, "push_seconds")["value"][-RECENT_STEPS:]),
        admission_only=run.info.bounds_admission_only,
        best_version=(status.get("best") or {}).get("policy_version"),
    )


def _doing(run: RunData) -> dict[str, str]:
    """Replica of the pipeline's stages → last activity."""
    return {
        name: record.get("doing", "") for name, record in run.stage_status.items() if name.rpartition("-")[0] in STAGES
    }


def _silent(run: RunData) -> dict[str, float]:
    written = {name: run.stage_status[name].get("t") for name, doing in _doing(run).items() if doing != STOPPED}
    return {name: max(0.0, run.t - t) for name, t in written.items() if t is not None}


def _median(values: Any) -> float | None:
    return float(np.median(values)) if len(values) else None


def _step_seconds(run: RunData) -> float | None:
    """Returns the median, which ignores the pause between two attempts."""
    return _median(np.diff(metric(run, TRAINER, "staleness_mean")["t"][-RECENT_STEPS - 1 :]))


def _stalled(run: RunData) -> str | None:
    incidents, steps = run.latest("incidents"), metric(run, TRAINER, "staleness_mean")["t"]
    newest = incidents[-1] if incidents else None
    if newest is None or newest["kind"] != "pipeline.stalled" or (len(steps) and steps[-1] > newest["t"]):
        return None
    return str(newest["sentence"])


def _alarm(run: RunData) -> str | None:
    steps = metric(run, TRAINER, "staleness_mean")["t"]
    since = steps[-RECENT_STEPS] if len(steps) >= RECENT_STEPS else 0.0
    alarms = [each for each in run.latest("incidents") if each["kind"] in _ALARMS and each["t"] >= since]
    return str(alarms[-1]["sentence"]) if alarms else None


def _idle(run: RunData) -> Mapping[str, float]:
    """Returns idle shares from the newest time metrics; without any, and after the run, from the status records."""
    newest = _idle_now(run) if (run.status or {}).get("state", "running") == "running" else {}
    return {**idle_shares(run.stage_status), **newest}


def _idle_now(run: RunData) -> dict[str, float]:
    idle_shares: dict[str, float] = {}
    for stage in STAGES:
        shares = [share for name in replicas(run, stage) if (share := _idle_share(run, name)) is not None]
        if shares:
            idle_shares[stage] = sum(shares) / len(shares)
    return idle_shares


def _idle_share(run: RunData, replica: str) -> float | None:
    named = {name: rows for name, rows in run.metrics[replica].items() if name.startswith(TIME) and len(rows["t"])}
    if not named:
        return None
    since = max(rows["t"][-1] for rows in named.values()) - IDLE_SECONDS
    sums = {name: float(rows["value"][rows["t"] > since].sum()) for name, rows in named.items()}
    whole = sum(sums.values())
    waited = sum(seconds for name, seconds in sums.items() if name.startswith(TIME + WAITING))
    return waited / whole if whole else None
