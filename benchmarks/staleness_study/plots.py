"""The plots of the staleness study, as SVG: what each bound came to, and reward over steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_AGAINST_THE_BOUND = {
    "accuracy": "held-out accuracy at the end",
    "effective_sample_size": "effective sample size, share",
    "seconds_per_step": "seconds per optimizer step",
}
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#b45309", "#7c3aed")
# The same figures give the same file.
matplotlib.rcParams.update({"svg.hashsalt": "millrace", "font.size": 10, "axes.spines.top": False})


def write_plots(cells: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Writes `staleness-bound.svg` from the medians and `staleness-reward.svg` from the campaigns into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    _save(_against_the_bound(cells), folder / "staleness-bound.svg")
    _save(_over_steps(rows), folder / "staleness-reward.svg")


def _against_the_bound(cells: Sequence[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    bounds = sorted({cell["max_staleness"] for cell in cells})
    for axes, (name, title) in zip(figure.subplots(1, 3), _AGAINST_THE_BOUND.items(), strict=True):
        for colour, loss in zip(_COLOURS, dict.fromkeys(cell["loss"] for cell in cells), strict=False):
            mine = sorted((cell for cell in cells if cell["loss"] == loss), key=lambda cell: int(cell["max_staleness"]))
            places = [bounds.index(cell["max_staleness"]) for cell in mine]
            axes.plot(places, [cell[name] for cell in mine], color=colour, marker="o", label=loss)
            if name == "accuracy":
                lowest, highest = ([cell[f"accuracy_{end}"] for cell in mine] for end in ("lowest", "highest"))
                axes.fill_between(places, lowest, highest, color=colour, alpha=0.12)
        axes.set_xticks(range(len(bounds)), [str(bound) for bound in bounds])
        _label(axes, "max_staleness η, policy versions", title)
    figure.axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    return figure


def _over_steps(rows: Sequence[dict[str, Any]]) -> Figure:
    bounds = sorted({row["max_staleness"] for row in rows})
    losses = list(dict.fromkeys(row["loss"] for row in rows))
    figure = Figure(figsize=(9, 2.6 * -(-len(bounds) // 3)), layout="constrained")
    panels = figure.subplots(-(-len(bounds) // 3), 3, sharex=True, sharey=True, squeeze=False)
    for axes, bound in zip(panels.flat, bounds, strict=False):
        for row in (row for row in rows if row["max_staleness"] == bound):
            colour = _COLOURS[losses.index(row["loss"])]
            label = row["loss"] if row["seed"] == 0 else None
            axes.plot(_smooth(row["reward_mean"]), color=colour, linewidth=1, alpha=0.8, label=label)
        axes.set_title(f"η = {bound}", fontsize=10)
        _label(axes, "optimizer step", "mean reward")
    figure.axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    return figure


def _smooth(values: Sequence[float], over: int = 5) -> list[float]:
    """Running mean over the last `over` steps."""
    windows = (values[max(0, end - over) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#e5e7eb")


def _save(figure: Figure, file: Path) -> None:
    figure.savefig(file, metadata={"Date": None})
