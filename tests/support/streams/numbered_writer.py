"""Commits numbered rows or checkpoints, until it is killed, fenced or done. A separate process.

    numbered_writer.py STORE PROCESS HOW       PROCESS: the name that its failpoints are armed for

HOW: `parts`, each of 1 to 4 rows; `grouped`, rows through a GroupCommit; `checkpoints`, of steps 0, 1, 2 …
Prints the number committed so far: when it has opened, and after each write. Ends with FENCED if it was fenced.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3]))

from support.streams.numbered import PATH, numbered

from millrace.errors import FENCED
from storage.checkpoints import CheckpointWriter
from storage.errors import Fenced
from storage.failpoints import arm
from storage.schema import METRIC
from storage.stores.base import Store
from storage.stores.factory import open_store
from storage.streams.group_commit import GroupCommit
from storage.streams.stream import StreamWriter

ENDLESS = 100_000
"""More than a writer gets to before something happens to it."""


def report(committed: int) -> None:
    print(committed, flush=True)


def write_rows(store: Store, process: str, *, grouped: bool) -> None:
    writer = StreamWriter(store, PATH, METRIC, process)
    report(writer.rows)
    if not grouped:
        while writer.rows < ENDLESS:
            writer.write(numbered(writer.rows, writer.parts % 4 + 1, process), tokens=0)
            report(writer.rows)
    with GroupCommit(writer, max_rows=4, max_bytes=1 << 20, max_seconds=0.002) as group:
        while group.rows < ENDLESS:
            group.append(numbered(group.rows, 1, process), tokens=0)
            report(writer.rows)


def write_checkpoints(store: Store, process: str) -> None:
    """Each checkpoint has two files that no other has."""
    writer = CheckpointWriter(store, writer=process)
    first = 0 if writer.latest is None else writer.latest.step + 1
    report(first)
    for step in range(first, ENDLESS):
        files = {"model": b"%d model " % step * 100, "optimizer": b"%d optimizer " % step * 200}
        writer.commit(step, files, {"step": step})
        report(step + 1)


def main(url: str, process: str, how: str) -> int:
    arm(process)
    try:
        if how == "checkpoints":
            write_checkpoints(open_store(url), process)
        else:
            write_rows(open_store(url), process, grouped=how == "grouped")
    except Fenced:
        return FENCED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
