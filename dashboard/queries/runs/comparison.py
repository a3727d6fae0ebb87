"""Comparison of runs: different settings, final and best figures, and smoothed lines."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dashboard.queries.learning import TRAINER
from dashboard.queries.runs.table import ABSENT, differing
from dashboard.queries.series import ChartLine, metric, over_versions
from dashboard.queries.smoothing import Smoothed, smooth, trailing_mean
from dashboard.queries.verdict.rules import duration
from dashboard.read.model import RunData
from dashboard.read.settings import settings
from millrace.control.collapse import STEPS
from millrace.runs.status import largest_and_bound

_NOW_STEPS = 20
_WINDOWS = 40
"""Windows in the longest run: enough to show trends, few enough to keep the runs' lines apart."""
_MOST_POINTS = 150
"""Points per line; up to eight runs are drawn at once, each with a band."""


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Returns the config keys whose values differ, each with its value in every run."""
    configs = [settings(run.info.config) for run in runs]
    return [(key, [config.get(key, ABSENT) for config in configs]) for key in differing(configs)]


def window(runs: Sequence[RunData]) -> int:
    """Returns the number of versions to smooth over: a fortieth of the longest run."""
    longest = max(len(metric(run, TRAINER, "reward_mean")["value"]) for run in runs)
    return max(1, longest // _WINDOWS)


def smoothed(run: RunData, name: str, versions: int) -> Smoothed:
    """Smooths one of the trainer's metrics over `versions` policy versions."""
    return smooth(over_versions(run, TRAINER, name), versions, _MOST_POINTS)


def figures(run: RunData) -> Mapping[str, str]:
    """Name of a figure → its value as text; in the same order for every run."""
    status = run.status or {}
    staleness = status.get("staleness", {})
    reward = over_versions(run, TRAINER, "reward_mean")
    rewards = trailing_mean(reward, STEPS)
    rolled_back = run.outcomes.index("rolled_back") if "rolled_back" in run.outcomes else -1
    taken = run.consumed["outcome"] != rolled_back
    dropped = np.count_nonzero(taken & ~run.trained)
    times = metric(run, TRAINER, "reward_mean")["t"]
    accuracies = ChartLine(run.evaluations["policy_version"], run.evaluations["accuracy"])
    return {
        "state": str(status.get("state", ABSENT)),
        "policy version": f"{status['steps']}/{status['max_steps']}" if status else ABSENT,
        "from first to last step": duration(float(np.ptp(times))) if len(times) else ABSENT,
        "seconds a step, median": _number(float(np.median(np.diff(np.sort(times)))) if len(times) > 1 else None, 2),
        f"reward, mean of the last {_NOW_STEPS} steps": _last(reward),
        f"reward, best mean of {STEPS} steps": _best(rewards),
        "held-out accuracy, newest": _newest_accuracy(run),
        "held-out accuracy, best": _best(accuracies),
        "staleness, mean": _number(staleness.get("mean"), 2),
        "staleness, largest of bound": _largest_of_bound(staleness) if staleness else ABSENT,
        "dropped, share of the rollouts taken": _number(dropped / taken.sum() if taken.any() else None, 3),
        f"effective sample size, last {_NOW_STEPS} steps": _last(over_versions(run, TRAINER, "effective_sample_size")),
        f"response length in tokens, last {_NOW_STEPS} steps": _last(
            over_versions(run, TRAINER, "response_length_mean_tokens"), digits=1
        ),
    }


def _newest_accuracy(run: RunData) -> str:
    """Returns the accuracy with half the width of its 95 % interval."""
    if not len(run.evaluations["accuracy"]):
        return ABSENT
    names = ("policy_version", "accuracy", "accuracy_low", "accuracy_high")
    version, accuracy, low, high = (float(run.evaluations[name][-1]) for name in names)
    return f"{accuracy:.3f} ±{(high - low) / 2:.3f} (v{version:.0f})"


def _largest_of_bound(staleness: Mapping[str, Any]) -> str:
    return largest_and_bound(staleness["max"], staleness["bound"], admission_only=staleness["admission_only"])


def _last(line: ChartLine, digits: int = 3) -> str:
    values = line.y[-_NOW_STEPS:]
    values = values[np.isfinite(values)]
    return _number(float(values.mean()) if len(values) else None, digits)


def _best(line: ChartLine) -> str:
    return _at(line, int(np.nanargmax(line.y))) if np.isfinite(line.y).any() else ABSENT


def _at(line: ChartLine, index: int) -> str:
    return f"{line.y[index]:.3f} (v{line.x[index]:.0f})" if len(line.x) else ABSENT


def _number(value: float | None, digits: int) -> str:
    return ABSENT if value is None or not np.isfinite(value) else f"{value:.{digits}f}"
