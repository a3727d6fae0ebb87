"""The building blocks of a view: charts and tables with a description.

Blocks depend only on the data, so page, export and tests build the same blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from dashboard.read.model import RunData


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The content of a table: text only."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    verdict: str | None = None
    """`good` or `bad`, shown in green or red."""
    note: str = ""
    """Another sentence, such as an error."""
    values: bool = False
    """Whether all columns except the first contain values to compare, which are right-aligned."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a view, built from one run or from several to compare: a chart or a table."""

    id: str
    """Unique among all blocks; letters, digits, dashes."""
    title: str
    sentence: str
    """Description for a first-time reader."""
    build: Callable[[Sequence[RunData]], go.Figure | Rows]
    wide: bool = False
    """Whether it takes the whole width of the page."""
    requires: Callable[[RunData], bool] | None = None
    """Whether a run has the data; the block is hidden if none of the runs does. None: always shown."""


@dataclass(frozen=True, kw_only=True)
class Chart(Block):
    """A figure."""

    build: Callable[[Sequence[RunData]], go.Figure]


@dataclass(frozen=True, kw_only=True)
class Table(Block):
    """A table of text."""

    build: Callable[[Sequence[RunData]], Rows]


@dataclass(frozen=True, kw_only=True)
class View:
    """One page of a run."""

    name: str
    """Name in the address: letters and dashes."""
    title: str
    sentence: str
    blocks: Sequence[Block]
    num_key: int = 4
    """Number of blocks shown first; the page folds the others, and those without data."""
    is_smooth: bool = False
    """Whether its lines are smoothed already."""

    def blocks_for(self, runs: Sequence[RunData]) -> list[Block]:
        """Returns the blocks with data for at least one of the runs."""
        return [block for block in self.blocks if block.requires is None or any(map(block.requires, runs))]
