"""Text and tables for a terminal, safe for any content of a run.

Models, prompt authors and damaged disks write that content, so no control character or markup in it may reach the
terminal.
"""

from collections.abc import Sequence
from datetime import datetime

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


def plain(text: str, style: str = "") -> Text:
    """`text` with control and formatting characters escaped, and no markup."""
    return Text("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text), style)


def new_table(title: str, *, left: Sequence[str], right: Sequence[str]) -> Table:
    """An empty table. The columns `left` hold text that folds, the columns `right` numbers."""
    made = Table(title=plain(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in left:
        made.add_column(name, overflow="fold")
    for name in right:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def local_time(t: float) -> str:
    """Unix seconds as a date and time in this machine's time zone."""
    return datetime.fromtimestamp(t).astimezone().strftime("%m-%d %H:%M:%S")
