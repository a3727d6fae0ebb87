"""Commits numbered rows, until it is killed, fenced or done. Run as a process by its tests.

    numbered_writer.py STORE PROCESS ROWS HOW       PROCESS: the name that its failpoints are armed for
                                                    HOW: parts, each of 1 to 4 rows; or grouped, through a GroupCommit

Prints the number of rows committed so far: when it has opened, and after each write. Ends with 76 if it was fenced, as
a stage does.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from support.streams.numbered import PATH, numbered

from storage.errors import Fenced
from storage.failpoints import arm
from storage.schema import METRIC
from storage.stores.factory import open_store
from storage.streams.group_commit import GroupCommit
from storage.streams.stream import StreamWriter

FENCED = 76


def write_parts(writer: StreamWriter, rows: int, name: str) -> None:
    while writer.rows < rows:
        writer.write(numbered(writer.rows, writer.parts % 4 + 1, name), tokens=0)
        print(writer.rows, flush=True)


def write_grouped(writer: StreamWriter, rows: int, name: str) -> None:
    with GroupCommit(writer, max_rows=4, max_bytes=1 << 20, max_seconds=0.002) as group:
        while group.rows < rows:
            group.append(numbered(group.rows, 1, name), tokens=0)
            print(writer.rows, flush=True)


def main(url: str, process: str, rows: int, how: str) -> int:
    arm(process)
    try:
        writer = StreamWriter(open_store(url), PATH, METRIC, process)
        print(writer.rows, flush=True)
        {"parts": write_parts, "grouped": write_grouped}[how](writer, rows, process)
    except Fenced:
        return FENCED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
