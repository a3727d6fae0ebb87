"""Charts of the learning page about responses, from the rows that the trainer took and its metrics.

consumed rows ─► groups ─► standard deviation of each group's rewards ─┬─► by policy version: mean and quantiles
              └─────────────────────────────── lengths of responses ───┘
metrics of the trainer ─► mean of each component of the reward
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from dashboard.queries.series import NO_LINE, TRAINER, ChartLine, Floats, measured, thin
from dashboard.read.model import RunData
from dashboard.views.blocks import VERSIONS, Chart, line_per_source, lines, missing
from dashboard.views.colours import BLUE, GREY, ORANGE, SEQUENCE, SKY, VERMILION, colour_number
from dashboard.views.figures import Series, line_chart
from millrace.rewards.base import REWARD_COMPONENT

_SPREAD = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
_LENGTHS = {**_SPREAD, "p99": 0.99, "max": 1.0}
"""Names and shares of quantiles."""
_SPREAD_COLOURS = {"mean": BLUE, "p10": SKY, "p50": GREY, "p90": ORANGE}
_LENGTH_COLOURS = {"p10": SKY, "p50": BLUE, "p90": ORANGE, "p99": VERMILION, "max": GREY}
_DASHES = ("solid", "dash", "dot")
MOST_COMPONENTS = 16
"""Maximum number of lines in the chart."""


def _spread(run: RunData) -> list[Series]:
    spread = reward_spread(run).items()
    return [
        *(Series(name=name, line=line, colour=_SPREAD_COLOURS[name]) for name, line in spread),
        *line_per_source([run], lambda of_source: reward_spread(of_source).get("mean", NO_LINE), "mean"),
    ]


def _lengths(run: RunData) -> list[Series]:
    return [
        *(Series(name=name, line=line, colour=_LENGTH_COLOURS[name]) for name, line in lengths(run).items()),
        *line_per_source([run], lambda of_source: lengths(of_source).get("p90", NO_LINE), "p90"),
    ]


def _components(runs: Sequence[RunData]) -> go.Figure:
    by_run = [components(run) for run in runs]
    names = sorted({name for named in by_run for name in named})
    alone = len(runs) == 1
    series = []
    for number, (run, named) in enumerate(zip(runs, by_run, strict=True)):
        for name, line in named.items():
            place = names.index(name)
            series.append(
                Series(
                    name=name if alone else f"{run.info.run_id}, {name}",
                    line=line,
                    colour=colour_number(place if alone else number),
                    dash=_DASHES[(place // len(SEQUENCE) if alone else place) % len(_DASHES)],
                )
            )
    return line_chart(series, x=VERSIONS, y="mean of the component", empty=missing(runs), from_zero=True)


def reward_spread(run: RunData) -> dict[str, ChartLine]:
    """Standard deviation of the rewards within a group: mean and quantiles over the groups taken for each version.

    Includes dropped groups, but not groups with fewer than two known rewards.
    """
    consumed = run.consumed
    if len(consumed["policy_version"]) == 0:
        return {}
    starts = np.flatnonzero(consumed["sample_index"] == 0)
    rewards = consumed["reward"].astype(np.float64)
    has_reward = np.isfinite(rewards)
    rewards = np.where(has_reward, rewards, 0.0)
    counts = np.add.reduceat(has_reward, starts, dtype=np.int64)
    sums, squares = np.add.reduceat(rewards, starts), np.add.reduceat(rewards**2, starts)
    some = counts >= 2
    variance = squares[some] / counts[some] - (sums[some] / counts[some]) ** 2
    # Rounding may give values slightly below 0 where all rewards are equal.
    deviations = np.sqrt(np.maximum(variance, 0.0))
    versions = consumed["policy_version"][starts][some]
    return {"mean": _means(versions, deviations), **_quantiles(versions, deviations, _SPREAD)}


def lengths(run: RunData) -> dict[str, ChartLine]:
    """Quantiles of the response length in tokens over all responses taken for each version, including dropped ones."""
    return _quantiles(run.consumed["policy_version"], run.consumed["tokens"].astype(np.float64), _LENGTHS)


def components(run: RunData) -> dict[str, ChartLine]:
    """Name of a reward component → mean over a step's responses; at most 16 components."""
    names = sorted(name for name in run.metrics.get(TRAINER, {}) if name.startswith(REWARD_COMPONENT))
    return {name.removeprefix(REWARD_COMPONENT): measured(run, name) for name in names[:MOST_COMPONENTS]}


def _means(versions: npt.NDArray[np.int64], values: Floats) -> ChartLine:
    distinct, at = np.unique(versions, return_inverse=True)
    return thin(ChartLine(distinct.astype(np.float64), np.bincount(at, values, len(distinct)) / np.bincount(at)))


def _quantiles(versions: npt.NDArray[np.int64], values: Floats, shares: dict[str, float]) -> dict[str, ChartLine]:
    """Quantile name → for each version, the smallest value not exceeded by this share of its values."""
    if len(versions) == 0:
        return {}
    order = np.lexsort((values, versions))
    distinct, starts, counts = np.unique(versions[order], return_index=True, return_counts=True)
    x, ascending = distinct.astype(np.float64), values[order]
    at = {name: starts + np.maximum(np.ceil(share * counts).astype(np.int64) - 1, 0) for name, share in shares.items()}
    return {name: thin(ChartLine(x, ascending[at[name]]), largest=name == "max") for name in shares}


BLOCKS = (
    Chart(
        id="learning-reward-spread",
        title="Reward spread",
        sentence="Standard deviation of the rewards within a group: mean and quantiles over the groups taken for each "
        "step, including dropped ones. A group at 0 teaches nothing. For several runs: the mean.",
        build=lines(
            _spread,
            lambda run: reward_spread(run).get("mean", NO_LINE),
            x=VERSIONS,
            y="standard deviation of the reward",
        ),
    ),
    Chart(
        id="learning-reward-components",
        title="Components of the reward",
        sentence="Mean over the responses of each step of each component that the reward reports with its total.",
        build=_components,
    ),
    Chart(
        id="learning-lengths",
        title="Response length, quantiles",
        sentence="10 % of the responses taken for each step, including dropped ones, are no longer than p10, half no "
        "longer than p50, and so on. For several runs: p90.",
        build=lines(_lengths, lambda run: lengths(run).get("p90", NO_LINE), x=VERSIONS, y="response tokens"),
    ),
)
