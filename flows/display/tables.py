"""Lines and tables of text, for a terminal and as Markdown.

Runs hold text of models, prompt authors and damaged disks, so control characters and markup in it are escaped.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))

Row = dict[str, str]
"""A row of a Markdown table, by column."""


@dataclass(frozen=True, kw_only=True)
class TitledTable:
    """A titled table, with lines below it; either may be absent."""

    title: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    numbers: int = 0
    """How many of the last columns hold numbers."""
    lines: Sequence[str] = ()


def echo(*parts: RenderableType, console: Console | None = None) -> None:
    """Prints text, whose lines are not wrapped so that they can be copied, and tables."""
    console = console or Console()
    for part in parts:
        renderable = plain(part) if isinstance(part, str) else part
        console.print(renderable, soft_wrap=isinstance(renderable, Text))


def plain(text: str, style: str = "") -> Text:
    """`text` with control and formatting characters escaped, and no markup."""
    return Text("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text), style)


def shortened(text: str, width: int) -> Text:
    """`plain(text)`, cut to `width` cells."""
    cell = plain(text[: width + 1])
    cell.truncate(width, overflow="ellipsis")
    return cell


def new_table(
    title: str, *, left: Sequence[str], right: Sequence[str] = (), rows: Iterable[Sequence[str | Text]] = ()
) -> Table:
    """A table whose columns `left` hold text that folds, and `right` numbers."""
    shown = plain(title) if title else None
    table = Table(title=shown, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(plain(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def for_terminal(section: TitledTable) -> Iterator[RenderableType]:
    """Yields the table, then the lines."""
    if section.header:
        text_columns = len(section.header) - section.numbers
        left, right = section.header[:text_columns], section.header[text_columns:]
        yield new_table(section.title, left=left, right=right, rows=section.rows)
    else:
        yield plain(section.title, "italic")
    for line in section.lines:
        yield Padding(plain(line), (0, 0, 0, 2), expand=False)
    if section.lines:
        yield ""


def for_markdown(section: TitledTable) -> str:
    """The section below a heading, its lines as a list. All text is escaped."""
    blocks = [f"## {_escaped(section.title)}"] if section.title else []
    if section.header:
        blocks.append(_markdown_table([[_escaped(cell) for cell in row] for row in (section.header, *section.rows)]))
    if section.lines:
        blocks.append("\n".join(f"- {_escaped(line)}" for line in section.lines))
    return "\n\n".join(blocks)


def as_markdown(rows: Sequence[Row]) -> str:
    """The rows (at least one) as a Markdown table; cells may hold markup, and a missing cell stays empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return _markdown_table([names, *([row.get(name, "") for name in names] for row in rows)])


def _markdown_table(lines: Sequence[Sequence[str]]) -> str:
    header, *rows = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>()#+!|~" else c if c.isprintable() else " " for c in text)


def local_time(t: float) -> str:
    """Unix seconds as a date and time in this machine's time zone."""
    return datetime.fromtimestamp(t).astimezone().strftime("%m-%d %H:%M:%S")


def duration(seconds: float) -> str:
    """The time in its two largest units, such as `2 h 5 min`."""
    whole = round(seconds)
    for (unit, size), (smaller_unit, smaller_size) in pairwise(_UNITS):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller_size} {smaller_unit}"
    return f"{whole} s"
