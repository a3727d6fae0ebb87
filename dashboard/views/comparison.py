"""The summary of a comparison: different settings, final figures with their differences, and a line for each run."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from dashboard.queries.run_table import ABSENT, decisive, differing, is_incidental, task
from dashboard.queries.series import (
    NO_LINE,
    TRAINER,
    ChartLine,
    Floats,
    accuracy,
    apart,
    clock,
    mean_of_last,
    metric,
    minutes,
    over_versions,
    resumes,
)
from dashboard.read.model import RunData
from dashboard.read.run_reader import settings
from dashboard.read.tokens import shortened, visible
from dashboard.views.blocks import MINUTES, NO_STEP, VERSIONS, Chart, Rows, Table, View, line_per_run, number
from dashboard.views.colours import colour_number
from dashboard.views.figures import Series, line_chart
from millrace.runtime.metrics import RECENT_STEPS

_CELL_CHARACTERS = 200
_Z = 1.96
"""Standard errors to each side of a 95 % interval."""
_WINDOWS = 40
"""Windows in the longest run: enough to show trends, few enough to keep the runs' lines apart."""
_MOST_POINTS = 150
"""Points per line; up to eight runs are drawn at once, each with a band."""
_BANDS_OPACITY = 0.4
"""Total opacity of all bands, so that lines stay visible."""


class Measured(NamedTuple):
    """A figure of a run, with the ends of its 95 % interval; NaN if unknown."""

    value: float = np.nan
    note: str = ""
    """Shown after it."""
    low: float = np.nan
    high: float = np.nan


_UNKNOWN = Measured()


class _Figure(NamedTuple):
    measure: Callable[[RunData], Measured]
    digits: int = 3
    better: int = 0
    """1 if more is better, -1 if less is, 0 if neither."""
    of_task: bool = False
    """Whether it can only be compared between runs with the same held-out prompts and reward."""


def _progress(run: RunData) -> Measured:
    return Measured(run.status["steps"], f"/{run.status['max_steps']}") if run.status else _UNKNOWN


def _seconds(run: RunData) -> Floats:
    """Returns the seconds between steps of the same attempt."""
    at = np.sort(minutes(run, metric(run, TRAINER, "reward_mean")["t"]))
    return np.delete(60 * np.diff(at), resumes(run, at) - 1)


def _minutes(run: RunData) -> Measured:
    return Measured(float(_seconds(run).sum()) / 60)


def _step_seconds(run: RunData) -> Measured:
    seconds = _seconds(run)
    return Measured(float(np.median(seconds))) if len(seconds) else _UNKNOWN


def _newest(name: str) -> Callable[[RunData], Measured]:
    def measure(run: RunData) -> Measured:
        values = over_versions(run, TRAINER, name).y[-RECENT_STEPS:]
        values = values[np.isfinite(values)]
        if not len(values):
            return _UNKNOWN
        error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
        mean, half = float(values.mean()), _Z * float(error)
        return Measured(mean, "", mean - half, mean + half)

    return measure


def _best_reward(run: RunData) -> Measured:
    line = mean_of_last(over_versions(run, TRAINER, "reward_mean"), RECENT_STEPS)
    if not np.isfinite(line.y).any():
        return _UNKNOWN
    at = int(np.nanargmax(line.y))
    return Measured(float(line.y[at]), f" (v{line.x[at]:.0f})")


def _accuracy_of(run: RunData, choose: Callable[[Floats], int]) -> Measured:
    """Returns the accuracy of the evaluation that `choose` finds among the accuracies, with its 95 % interval."""
    if not len(run.evaluations["accuracy"]):
        return _UNKNOWN
    at = choose(run.evaluations["accuracy"])
    names = ("policy_version", "accuracy", "accuracy_low", "accuracy_high")
    version, value, low, high = (float(run.evaluations[name][at]) for name in names)
    interval = f" [{low:.3f}, {high:.3f}]" if np.isfinite(high - low) else ""
    return Measured(value, f"{interval} (v{version:.0f})", low, high)


def _staleness(run: RunData, name: str) -> Measured:
    staleness = (run.status or {}).get("staleness", {})
    if staleness.get(name) is None:
        return _UNKNOWN
    limit = ", admitted within" if staleness["admission_only"] else " of"
    return Measured(staleness[name], f"{limit} {staleness['bound']}" if name == "max" else "")


def _dropped(run: RunData) -> Measured:
    rolled_back = run.consumed.outcomes.index("rolled_back") if "rolled_back" in run.consumed.outcomes else -1
    taken = run.consumed["outcome"] != rolled_back
    return Measured(np.count_nonzero(taken & ~run.trained) / taken.sum()) if taken.any() else _UNKNOWN


_FIGURES: Mapping[str, _Figure] = {
    "policy version": _Figure(_progress, 0),
    "minutes of training": _Figure(_minutes, 1),
    "seconds a step, median": _Figure(_step_seconds, 2, -1),
    f"reward, mean of the last {RECENT_STEPS} steps": _Figure(_newest("reward_mean"), better=1, of_task=True),
    f"reward, best mean of {RECENT_STEPS} steps": _Figure(_best_reward, better=1, of_task=True),
    "held-out accuracy, newest": _Figure(lambda run: _accuracy_of(run, lambda _: -1), better=1, of_task=True),
    "held-out accuracy, best": _Figure(
        lambda run: _accuracy_of(run, lambda values: int(np.nanargmax(values))), better=1, of_task=True
    ),
    "staleness, mean": _Figure(partial(_staleness, name="mean"), 2),
    "staleness, largest and bound": _Figure(partial(_staleness, name="max"), 0),
    "dropped, share of the rollouts taken": _Figure(_dropped, better=-1),
    f"effective sample size, last {RECENT_STEPS} steps": _Figure(_newest("effective_sample_size"), better=1),
    f"response length in tokens, last {RECENT_STEPS} steps": _Figure(_newest("response_length_mean_tokens"), 1),
}


def _figures(runs: Sequence[RunData]) -> Rows:
    states = [str((run.status or {}).get("state", ABSENT)) for run in runs]
    same = len({task(settings(run.info.config), run.info.attempts[-1].inputs) for run in runs}) == 1
    rows = []
    for name, figure in _FIGURES.items():
        better = figure.better if same or not figure.of_task else 0
        rows.append([name, *_compared(list(map(figure.measure, runs)), figure.digits, better)])
    note = "" if same else "Held-out prompts or rewards differ, so rewards and accuracies can't be compared."
    return Rows(header=["", *_names(runs)], rows=[["state", *states], *rows], note=note, values=True)


def _compared(measured: Sequence[Measured], digits: int, better: int) -> list[str]:
    """Formats a figure of each run; adds differences to the first run, and a star to one that is best beyond noise."""
    cells = []
    for place, one in enumerate(measured):
        others = [other for other in measured if other is not one and np.isfinite(other.value)]
        is_best = others and all(one.low > other.high if better > 0 else one.high < other.low for other in others)
        difference = one.value - measured[0].value if better and place else np.nan
        change = f", {difference:+.{digits}f}" if np.isfinite(difference) else ""
        cells.append(f"{number(one.value, digits)}{one.note}{change}{' ★' if better and is_best else ''}")
    return cells


def _differences(runs: Sequence[RunData], *, incidental: bool) -> Rows:
    configs = [settings(run.info.config) for run in runs]
    rows = [
        [shortened(visible(text), _CELL_CHARACTERS) for text in (key, *(config.get(key, ABSENT) for config in configs))]
        for key in differing(configs)
        if is_incidental(key) == incidental
    ]
    note = "" if rows or len(runs) == 1 else "All settings are the same."
    return Rows(header=["setting", *_names(runs)], rows=rows, note=note, values=True)


def _names(runs: Sequence[RunData]) -> list[str]:
    return [run.info.run_id for run in runs]


def _reward(runs: Sequence[RunData]) -> go.Figure:
    """Draws a line per run, smoothed over a fortieth of the longest run, with a band of the middle half.

    Runs that differ only in their seed have dotted lines, and a line of their mean with a band from lowest to highest.
    """
    lines = [over_versions(run, TRAINER, "reward_mean") for run in runs]
    window = max(1, max(len(line.x) for line in lines) // _WINDOWS)
    opacity = _BANDS_OPACITY / len(runs)
    series, means = list[Series](), list[Series]()
    for members in _seeds(runs):
        is_alone, of_members = len(members) == 1, list[ChartLine]()
        for index in members:
            low, mean, high = _band(lines[index], window)
            of_members.append(mean)
            series.append(
                Series(
                    name=runs[index].info.run_id, line=mean, colour=colour_number(index),
                    dash="solid" if is_alone else "dot", interval_opacity=opacity,
                    interval=(low, high) if window > 1 and is_alone else None,
                )
            )  # fmt: skip
        if not is_alone:
            low, mean, high = _over_seeds(of_members)
            means.append(
                Series(
                    name=f"{runs[members[0]].info.run_id}, mean of {len(members)} runs", line=mean,
                    colour=colour_number(members[0]), interval=(low, high), interval_opacity=opacity,
                )
            )  # fmt: skip
    bands = ["quartiles"] if any(entry.interval is not None for entry in series) else []
    bands += ["range of seeds"] if means else []
    notes = [f"means of {window} versions"] if window > 1 else []
    notes += [f"bands: {' or '.join(bands)}"] if bands else []
    x = f"{VERSIONS}<br>({'; '.join(notes)})" if notes else VERSIONS
    return line_chart([*series, *means], x=x, y="mean reward", empty=NO_STEP)


def _seeds(runs: Sequence[RunData]) -> Sequence[Sequence[int]]:
    """Groups the indices of runs with the same settings, but for seed, name and addresses."""
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault(decisive(settings(run.info.config)), []).append(index)
    return list(groups.values())


def _over_seeds(lines: Sequence[ChartLine]) -> tuple[ChartLine, ChartLine, ChartLine]:
    """Returns the lowest line, the mean and the highest one, for the policy versions that all lines have."""
    if not all(len(line.x) for line in lines):
        return NO_LINE, NO_LINE, NO_LINE
    first, last = max(line.x[0] for line in lines), min(line.x[-1] for line in lines)
    x = lines[0].x[(lines[0].x >= first) & (lines[0].x <= last)]
    values = np.array([np.interp(x, line.x, line.y) for line in lines])
    return ChartLine(x, values.min(axis=0)), ChartLine(x, values.mean(axis=0)), ChartLine(x, values.max(axis=0))


def _band(line: ChartLine, window: int) -> tuple[ChartLine, ChartLine, ChartLine]:
    """Returns the lower quartile, the mean and the upper quartile of the last `window` points, without NaN.

    Has at most 150 points, including the last.
    """
    finite = np.isfinite(line.y)
    x, y = line.x[finite], line.y[finite]
    at = np.unique(np.linspace(0, len(x) - 1, min(len(x), _MOST_POINTS)).round().astype(np.int64))
    windows = [np.sort(y[max(0, end - window + 1) : end + 1]) for end in at.tolist()]
    parts = [(part[len(part) // 4], part.mean(), part[3 * len(part) // 4]) for part in windows]
    low, mean, high = (ChartLine(x[at], column) for column in np.array(parts).reshape(-1, 3).T)
    return low, mean, high


def _accuracy(runs: Sequence[RunData]) -> go.Figure:
    empty = "No version has been evaluated yet."
    return line_chart(line_per_run(runs, accuracy), x=VERSIONS, y="accuracy", empty=empty)


def _clocks(runs: Sequence[RunData]) -> go.Figure:
    lines = line_per_run(runs, lambda run: apart(run, ChartLine(*reversed(clock(run)))))
    return line_chart(lines, x=MINUTES, y=VERSIONS, empty=NO_STEP, from_zero=True)


COMPARISON = View(
    name="summary",
    title="Summary",
    sentence="Click a name in a legend to hide a run, double-click it to see that run alone.",
    is_smooth=True,
    blocks=(
        Table(
            id="compare-config",
            title="Different settings",
            sentence="Only the settings that are not the same in all of these runs.",
            build=partial(_differences, incidental=False),
            wide=True,
        ),
        Table(
            id="compare-figures",
            title="Final and best figures",
            sentence="In brackets: the policy version at which a figure was measured; then the difference to the first "
            "run. ★: the best, beyond the runs' 95 % intervals.",
            build=_figures,
            wide=True,
        ),
        Chart(
            id="compare-reward-mean",
            title="Reward",
            sentence="Mean reward of the groups trained at each step. The other pages have more lines.",
            build=_reward,
            wide=True,
        ),
        Chart(
            id="compare-accuracy",
            title="Held-out accuracy",
            sentence="Mean reward of one greedy answer per held-out prompt, for each evaluated version.",
            build=_accuracy,
        ),
        Chart(
            id="compare-progress",
            title="Progress",
            sentence="The policy version that each run had reached: the steeper, the faster.",
            build=_clocks,
        ),
        Table(
            id="compare-incidental",
            title="Different names, seeds and addresses",
            sentence="Settings that differ and do not change what is learned.",
            build=partial(_differences, incidental=True),
            wide=True,
        ),
    ),
    num_key=5,
)
