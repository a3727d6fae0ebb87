"""The summary of a comparison: different settings, final figures with their differences, and a line for each run."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from dashboard.queries.run_table import ABSENT, decisive, differing, is_incidental
from dashboard.queries.series import (
    NO_LINE,
    TRAINER,
    ChartLine,
    accuracy,
    clock,
    mean_of_last,
    metric,
    over_versions,
)
from dashboard.read.model import RunData
from dashboard.read.run_info import settings
from dashboard.read.tokens import shortened, visible
from dashboard.views.blocks import Chart, Rows, Table, View
from dashboard.views.colours import colour_number
from dashboard.views.figures import Series, line_chart
from dashboard.views.per_run import MINUTES, NO_STEP, VERSIONS, Build, line_per_run, number
from millrace.control.collapse import STEPS

_CELL_CHARACTERS = 200
_NOW_STEPS = 20
_WINDOWS = 40
"""Windows in the longest run: enough to show trends, few enough to keep the runs' lines apart."""
_MOST_POINTS = 150
"""Points per line; up to eight runs are drawn at once, each with a band."""
_BANDS_OPACITY = 0.4
"""Total opacity of all bands, so that lines stay visible."""

Measured = tuple[float, str]
"""A figure of a run, NaN if unknown, and a note to show after it."""
_UNKNOWN: Measured = (np.nan, "")


class _Figure(NamedTuple):
    measure: Callable[[RunData], Measured]
    digits: int = 3
    better: int = 0
    """1 if more is better, -1 if less is, 0 if neither."""


def _progress(run: RunData) -> Measured:
    return (run.status["steps"], f"/{run.status['max_steps']}") if run.status else _UNKNOWN


def _minutes(run: RunData) -> Measured:
    times = metric(run, TRAINER, "reward_mean")["t"]
    return (float(np.ptp(times)) / 60, "") if len(times) else _UNKNOWN


def _step_seconds(run: RunData) -> Measured:
    times = metric(run, TRAINER, "reward_mean")["t"]
    return (float(np.median(np.diff(np.sort(times)))), "") if len(times) > 1 else _UNKNOWN


def _newest(name: str) -> Callable[[RunData], Measured]:
    def measure(run: RunData) -> Measured:
        values = over_versions(run, TRAINER, name).y[-_NOW_STEPS:]
        values = values[np.isfinite(values)]
        return (float(values.mean()), "") if len(values) else _UNKNOWN

    return measure


def _best(line: ChartLine) -> Measured:
    if not np.isfinite(line.y).any():
        return _UNKNOWN
    at = int(np.nanargmax(line.y))
    return float(line.y[at]), f" (v{line.x[at]:.0f})"


def _newest_accuracy(run: RunData) -> Measured:
    """Returns the accuracy with half the width of its 95 % interval."""
    if not len(run.evaluations["accuracy"]):
        return _UNKNOWN
    names = ("policy_version", "accuracy", "accuracy_low", "accuracy_high")
    version, value, low, high = (float(run.evaluations[name][-1]) for name in names)
    interval = f" ±{(high - low) / 2:.3f}" if np.isfinite(high - low) else ""
    return value, f"{interval} (v{version:.0f})"


def _staleness(run: RunData, name: str) -> Measured:
    staleness = (run.status or {}).get("staleness", {})
    if staleness.get(name) is None:
        return _UNKNOWN
    limit = ", admitted within" if staleness["admission_only"] else " of"
    return staleness[name], f"{limit} {staleness['bound']}" if name == "max" else ""


def _dropped(run: RunData) -> Measured:
    rolled_back = run.outcomes.index("rolled_back") if "rolled_back" in run.outcomes else -1
    taken = run.consumed["outcome"] != rolled_back
    return (np.count_nonzero(taken & ~run.trained) / taken.sum(), "") if taken.any() else _UNKNOWN


_FIGURES: Mapping[str, _Figure] = {
    "policy version": _Figure(_progress, 0),
    "minutes from first to last step": _Figure(_minutes, 1),
    "seconds a step, median": _Figure(_step_seconds, 2, -1),
    f"reward, mean of the last {_NOW_STEPS} steps": _Figure(_newest("reward_mean"), better=1),
    f"reward, best mean of {STEPS} steps": _Figure(
        lambda run: _best(mean_of_last(over_versions(run, TRAINER, "reward_mean"), STEPS)), better=1
    ),
    "held-out accuracy, newest": _Figure(_newest_accuracy, better=1),
    "held-out accuracy, best": _Figure(lambda run: _best(accuracy(run)), better=1),
    "staleness, mean": _Figure(partial(_staleness, name="mean"), 2),
    "staleness, largest and bound": _Figure(partial(_staleness, name="max"), 0),
    "dropped, share of the rollouts taken": _Figure(_dropped, better=-1),
    f"effective sample size, last {_NOW_STEPS} steps": _Figure(_newest("effective_sample_size"), better=1),
    f"response length in tokens, last {_NOW_STEPS} steps": _Figure(_newest("response_length_mean_tokens"), 1),
}


def _figures(runs: Sequence[RunData]) -> Rows:
    states = [str((run.status or {}).get("state", ABSENT)) for run in runs]
    rows = [[name, *_compared(figure, list(map(figure.measure, runs)))] for name, figure in _FIGURES.items()]
    return Rows(header=["", *_names(runs)], rows=[["state", *states], *rows], values=True)


def _compared(figure: _Figure, measured: Sequence[Measured]) -> list[str]:
    """Formats a figure of each run; adds differences to the first run, and a star to the best if they differ."""
    values = np.array([value for value, _ in measured], np.float64)
    best = (
        np.nanmax(figure.better * values) if figure.better and np.unique(values[np.isfinite(values)]).size > 1 else None
    )
    cells = []
    for place, (value, note) in enumerate(measured):
        difference = value - values[0] if figure.better and place else np.nan
        change = f", {difference:+.{figure.digits}f}" if np.isfinite(difference) else ""
        star = " ★" if best is not None and figure.better * value == best else ""
        cells.append(f"{number(value, figure.digits)}{note}{change}{star}")
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


def _smoothed(metric_name: str, unit: str) -> Build:
    """Builds a line per run, smoothed over a fortieth of the longest run, with a band of the middle half.

    Runs that differ only in their seed have dotted lines, and a line of their mean with a band from lowest to highest.
    """

    def build(runs: Sequence[RunData]) -> go.Figure:
        lines = [over_versions(run, TRAINER, metric_name) for run in runs]
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
        x = f"{VERSIONS} ({'; '.join(notes)})" if notes else VERSIONS
        return line_chart([*series, *means], x=x, y=unit, empty=NO_STEP)

    return build


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
    lines = line_per_run(runs, lambda run: ChartLine(*reversed(clock(run))))
    return line_chart(lines, x=MINUTES, y=VERSIONS, empty=NO_STEP, from_zero=True)


def _chart(name: str, title: str, sentence: str, unit: str) -> Chart:
    return Chart(
        id=f"compare-{name.replace('_', '-')}", title=title, sentence=sentence, build=_smoothed(name, unit),
        wide=name == "reward_mean",
    )  # fmt: skip


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
            "run. ★: the best.",
            build=_figures,
            wide=True,
        ),
        _chart("reward_mean", "Reward", "Mean reward of the groups trained at each step.", "mean reward"),
        Chart(
            id="compare-accuracy",
            title="Held-out accuracy",
            sentence="Mean reward of one greedy answer per held-out prompt, for each evaluated version.",
            build=_accuracy,
        ),
        _chart(
            "staleness_mean",
            "Staleness",
            "Mean staleness of the trajectories trained at each step.",
            "policy versions",
        ),
        _chart(
            "effective_sample_size",
            "Effective sample size",
            "How many equally weighted tokens the clipped weights are worth, as a share of all: 1 is on-policy.",
            "share of tokens",
        ),
        _chart("entropy", "Entropy", "Entropy of the policy's next token.", "nats"),
        _chart(
            "response_length_mean_tokens", "Response length", "Mean length of the responses of each step.", "tokens"
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
    num_key=9,
)
