"""A writer that commits parts of 1 to 4 rows as fast as it can, until it is killed. Run as a process by its test.

Prints the number of rows committed so far: when it opens (0), and after each commit.
"""

import itertools
import sys
from pathlib import Path

import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parents[3]))

from storage.schema import METRIC
from storage.stores.local import LocalStore
from storage.streams.stream import StreamWriter


def numbered(first: int, rows: int) -> pa.Table:
    columns = {
        "t": [0.0] * rows,
        "incarnation": [0] * rows,
        "policy_version": list(range(first, first + rows)),
        "name": ["row"] * rows,
        "value": [0.0] * rows,
    }
    return pa.table({name: pa.array(column, METRIC.field(name).type) for name, column in columns.items()})


if __name__ == "__main__":
    store = LocalStore(sys.argv[1])
    print(0, flush=True)
    writer = StreamWriter(store, "s", METRIC, "w")
    for count in itertools.count():
        writer.write(numbered(writer.rows, count % 4 + 1), tokens=0)
        print(writer.rows, flush=True)
