"""Data of a run's home page that its other pages do not show."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dashboard.queries.learning import TRAINER
from dashboard.queries.series import ChartLine, Floats, metric, minutes, over_versions, thin
from dashboard.queries.smoothing import trailing_mean
from dashboard.read.model import RunData
from millrace.control.collapse import STEPS
from millrace.runtime.metrics import TIME

_MOST_BINS = 150
_SECONDS = "/seconds"


def smoothed_reward(run: RunData) -> ChartLine:
    """Mean reward of the ten steps up to each version, which the collapse rules also use."""
    return thin(trailing_mean(over_versions(run, TRAINER, "reward_mean"), STEPS))


def step_phases(run: RunData) -> Mapping[str, ChartLine]:
    """The trainer's seconds per step by kind of work and waiting, over policy versions.

    Times are recorded about every two seconds, so a point is the mean over the steps between two records.
    """
    named = {
        name.removeprefix(TIME).removesuffix(_SECONDS): rows
        for name, rows in run.metrics.get(TRAINER, {}).items()
        if name.startswith(TIME) and len(rows["t"])
    }
    if not named:
        return {}
    versions = np.unique(np.concatenate([rows["policy_version"] for rows in named.values()])).astype(np.float64)
    edges = versions[:: -(-len(versions) // _MOST_BINS)]
    if len(edges) < 2:
        return {}
    phases = {}
    for kind, rows in named.items():
        cumulative = np.append(0.0, np.cumsum(rows["value"]))
        at = cumulative[np.searchsorted(rows["policy_version"], edges, side="right")]
        phases[kind] = ChartLine(edges[1:], np.diff(at) / np.diff(edges))
    return phases


def clock(run: RunData) -> ChartLine:
    """Policy version (x) → minutes from the run's start until it was made (y)."""
    rows = metric(run, TRAINER, "reward_mean")
    return ChartLine(rows["policy_version"].astype(np.float64), minutes(run, rows["t"]))


def by_clock(run: RunData, line: ChartLine) -> ChartLine:
    """Converts a line over policy versions to one over minutes since the run was started."""
    at = clock(run)
    return ChartLine(np.interp(line.x, at.x, at.y), line.y) if len(at.x) else line


def restarts(run: RunData) -> Floats:
    """Policy versions at which a stage was restarted, or the run was resumed with the same config."""
    at = clock(run)
    latest: Sequence[Mapping[str, Any]] = (run.status or {}).get("incidents", {}).get("latest", [])
    times = [incident["t"] for incident in latest if incident["kind"] == "stage.restarted"]
    times += [attempt.t_started for attempt in run.info.attempts[1:] if not attempt.changes]
    if not len(at.x) or not times:
        return np.empty(0)
    versions: Floats = np.unique(np.interp(minutes(run, np.array(times)), at.y, at.x).round())
    return versions


def checkpoints(run: RunData) -> Floats:
    """Policy versions at which the trainer spent time on a checkpoint."""
    rows = metric(run, TRAINER, f"{TIME}checkpoint{_SECONDS}")
    versions: Floats = np.unique(rows["policy_version"][rows["value"] > 0]).astype(np.float64)
    return versions
