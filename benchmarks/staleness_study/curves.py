"""Curves of the studies of adaptive control as SVG: held-out accuracy, and the bound in force."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.staleness_study.comparison import ADAPTIVE

_COLOURS = ("#94a3b8", "#7dd3fc", "#2563eb", "#059669", "#b45309", "#a855f7")
"""Of the fixed bounds in their order."""
_ADAPTIVE = "#dc2626"
_POINTS = 60
"""At which the curves of several seeds are averaged."""
# The same figures give the same file.
matplotlib.rcParams.update({"svg.hashsalt": "millrace", "font.size": 10, "axes.spines.top": False})


def write_curves(rows: Sequence[dict[str, Any]], targets: Mapping[str, float], file: Path) -> None:
    """Draws a row of panels per task. `rows` are those of one loss; `targets` are accuracies by task."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(10, 3.4 * len(tasks)), layout="constrained")
    panels = figure.subplots(len(tasks), 2, squeeze=False)
    for task, (over_steps, over_time) in zip(tasks, panels, strict=True):
        mine = [row for row in rows if row["task"] == task]
        colours = itertools.cycle(_COLOURS)
        # Bounds differ by factors.
        over_time.set_xscale("log")
        for bound in dict.fromkeys(row["bound"] for row in mine):
            colour = _ADAPTIVE if bound == ADAPTIVE else next(colours)
            seeds = [row for row in mine if row["bound"] == bound]
            _draw(over_steps, [row["curve_over_steps"] for row in seeds], colour, bound)
            _draw(over_time, [row["curve"] for row in seeds], colour, bound)
        for axes, x in ((over_steps, "optimizer step"), (over_time, "seconds, logarithmic")):
            axes.axhline(targets[task], color="#475569", linewidth=1, linestyle=":")
            axes.set_xlabel(x)
            axes.set_ylabel("held-out accuracy")
            axes.set_title(task, fontsize=10)
            axes.grid(axis="y", color="#e5e7eb")
    figure.axes[0].legend(frameon=False, fontsize=8, title="bound", title_fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def write_bounds(rows: Sequence[dict[str, Any]], phases: Sequence[str], steps: int, file: Path) -> None:
    """Draws a panel per shape with the bound that adaptive control had in each step; phases take `steps` each."""
    figure = Figure(figsize=(10, 1.9 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 1, squeeze=False, sharex=True)
    for row, (axes,) in zip(rows, panels, strict=True):
        bounds = row["bounds"]
        axes.step(range(len(bounds)), bounds, color=_COLOURS[3], linewidth=1.6, where="post")
        axes.set_ylim(0, max(bounds) * 1.35)
        axes.set_ylabel("bound")
        axes.set_title(row["shape"], fontsize=10)
        axes.grid(axis="y", color="#e5e7eb")
        for number, phase in enumerate(phases):
            if phase != "calm":
                axes.axvspan(number * steps, (number + 1) * steps, color="#e2e8f0", linewidth=0)
            middle = (number + 0.5) * steps
            axes.text(middle, max(bounds) * 1.24, phase, ha="center", va="center", fontsize=8, color="#475569")
    panels[-1][0].set_xlabel("optimizer step")
    panels[-1][0].set_xlim(0, len(phases) * steps)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def _draw(axes: Axes, curves: Sequence[Sequence[tuple[float, float]]], colour: str, label: str) -> None:
    """The mean of the curves as far as all of them reach, and their range."""
    first, last = (min(curve[end][0] for curve in curves if len(curve) > 1) for end in (1, -1))
    places = np.geomspace(first, last, _POINTS) if axes.get_xscale() == "log" else np.linspace(0.0, last, _POINTS)
    points = [np.array(sorted(curve), dtype=float) for curve in curves]
    values = np.stack([np.interp(places, one[:, 0], one[:, 1]) for one in points])
    axes.plot(places, values.mean(axis=0), color=colour, linewidth=1.8, label=label)
    axes.fill_between(places, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.1, linewidth=0)
