"""What every view is made of: charts and tables, each with a sentence that says what it shows.

A block knows the data and nothing of the page: the page, the export and the tests build the same ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from dashboard.data import RunData


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure built from runs: one, or several to be compared."""

    id: str
    """Unique among all blocks; letters, digits, dashes."""
    title: str
    sentence: str
    """What it shows, for somebody who sees it for the first time."""
    build: Callable[[Sequence[RunData]], go.Figure]
    wide: bool = False
    """Takes the whole width of the page."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a table shows now: text only."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    verdict: str | None = None
    """`good` or `bad`: shown as green or red, with a word."""
    note: str = ""
    """One more sentence, such as what is wrong."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table built from runs."""

    id: str
    title: str
    sentence: str
    build: Callable[[Sequence[RunData]], Rows]
    wide: bool = False


Block = Chart | Table


@dataclass(frozen=True, kw_only=True)
class View:
    """One page of a run."""

    name: str
    """In the address: letters and dashes."""
    title: str
    sentence: str
    blocks: Sequence[Block]
