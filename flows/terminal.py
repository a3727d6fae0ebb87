"""Text and tables for a terminal, safe to make of anything that a run holds.

What a run holds was written by a model, by the people who gave it prompts, and perhaps by a damaged disk: nothing of it
reaches the terminal as a control character, or as markup.
"""

from collections.abc import Sequence
from datetime import datetime

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


def plain(text: str, style: str = "") -> Text:
    """`text` with every control and formatting character spelt out, and no markup."""
    return Text("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text), style)


def new_table(title: str, *, left: Sequence[str], right: Sequence[str]) -> Table:
    """An empty table; its first columns are aligned left and fold, the others are numbers."""
    made = Table(title=plain(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in left:
        made.add_column(name, overflow="fold")
    for name in right:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def local_time(t: float) -> str:
    """Unix seconds as a person writes them, in this machine's time zone."""
    return datetime.fromtimestamp(t).astimezone().strftime("%m-%d %H:%M:%S")
