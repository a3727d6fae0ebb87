"""The building blocks of a view: charts and tables, each with a sentence that says what it shows.

A block depends on the data and not on the page: page, export and tests build the same ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from dashboard.read.model import RunData


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure built from one run, or from several to compare."""

    id: str
    """Unique among all blocks; letters, digits, dashes."""
    title: str
    sentence: str
    """What it shows, for a first-time reader."""
    build: Callable[[Sequence[RunData]], go.Figure]
    wide: bool = False
    """Takes the whole width of the page."""
    requires: Callable[[RunData], bool] | None = None
    """Whether a run has what this shows. A page leaves the block out if none of its runs has it. None: all have."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The content of a table: text only."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    verdict: str | None = None
    """`good` or `bad`, shown in green or red."""
    note: str = ""
    """Another sentence, such as what is wrong."""
    values: bool = False
    """Whether all columns but the first hold values to compare, numbers or not, aligned to the right."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table built from runs."""

    id: str
    title: str
    sentence: str
    build: Callable[[Sequence[RunData]], Rows]
    wide: bool = False
    requires: Callable[[RunData], bool] | None = None
    """As of a chart."""


Block = Chart | Table


@dataclass(frozen=True, kw_only=True)
class View:
    """One page of a run."""

    name: str
    """In the address: letters and dashes."""
    title: str
    sentence: str
    blocks: Sequence[Block]

    def blocks_for(self, runs: Sequence[RunData]) -> list[Block]:
        """The blocks that have something to show for at least one of the runs."""
        return [block for block in self.blocks if block.requires is None or any(map(block.requires, runs))]
