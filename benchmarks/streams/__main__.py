"""The cost of streams: durable writes and verified reads.

    by part size    write vs. write + fsync          read vs. memcpy          where the time goes

Trajectories have 1,024 response tokens each. Each round measures every contender. A time is the median over rounds, a
share of a bound the median of the shares within each round. On `s3://` the bounds are one PUT and one GET of the client
library, and a late reader is measured too, with and without prefetching.

    python -m benchmarks.streams [--store URL] [--parts 8 64] [--repeats 15] [--json PATH]

Without `--store`, a temporary folder is used. The bound then depends on the disk that holds it.
"""

import tempfile
import uuid
from typing import Any

from rich.console import Console

from benchmarks.report import machine, make_parser, make_table, print_targets, write_json
from benchmarks.streams.parts import measure_parts
from benchmarks.streams.rows import RESPONSE_TOKENS, rows_in
from storage.stores.factory import open_store

TARGETS = {"trajectories_per_second": 10_000, "write_share": 0.8, "read_share": 0.8}
"""For local stores: a write reaches either the rate or its share of the bound, a read its share of memcpy."""


def main() -> None:
    """Measures, prints the tables and writes the figures as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--store", metavar="URL", help="where to write; everything written is deleted at the end")
    parser.add_argument(
        "--parts", type=float, nargs="+", default=[8, 64], metavar="MB", help="sizes of a part, 10⁶ bytes"
    )
    parser.add_argument("--repeats", type=int, default=15, help="rounds that are counted")
    arguments = parser.parse_args()
    if arguments.repeats < 1 or min(arguments.parts) <= 0:
        parser.error("expected at least one repeat, and parts larger than 0 MB")
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as folder:
        url = arguments.store or folder
        result = measure(url, arguments.parts, repeats=arguments.repeats)
    _print(result)
    write_json(arguments.json, result)


def measure(url: str, megabytes: list[float], *, repeats: int) -> dict[str, Any]:
    """Figures for parts of these sizes on the store `url`, in seconds and bytes unless the name has another unit."""
    store = open_store(url)
    folder = f"benchmark-{uuid.uuid4().hex}"
    num_rows = [rows_in(size) for size in megabytes]
    try:
        result: dict[str, Any] = {
            "machine": machine(),
            "store": store.url,
            "response_tokens": RESPONSE_TOKENS,
            "parts": [measure_parts(store, f"{folder}/parts-{rows}", rows, repeats) for rows in num_rows],
        }
        if store.local_path(folder) is not None:
            result["targets"] = targets_met(result)
    finally:
        store.delete_tree(folder)
    return result


def targets_met(result: dict[str, Any]) -> dict[str, bool]:
    """Which of `TARGETS` the figures of `measure` reach, by part size."""
    met = {}
    for part in result["parts"]:
        size = _size(part)
        for name in ("write", "group_commit"):
            rate = part["rows"] / part["seconds"][name]
            fast = rate >= TARGETS["trajectories_per_second"]
            met[f"{name.replace('_', ' ')}, {size}"] = fast or part["share"][name] >= TARGETS["write_share"]
        met[f"read, bytes verified, {size}"] = part["share"]["bytes"] >= TARGETS["read_share"]
        met[f"read, values checked too, {size}"] = part["share"]["read"] >= TARGETS["read_share"]
    return met


def _print(result: dict[str, Any]) -> None:
    console = Console()
    for part in result["parts"]:
        _print_part(console, part)
    print_targets(console, result.get("targets", {}))


def _print_part(console: Console, part: dict[str, Any]) -> None:
    names = {
        "bound_write": part["bound"]["write"],
        "write": "stream write",
        "group_commit": "group commit",
        "bound_read": part["bound"]["read"],
        "bytes": "bytes verified",
        "read": "stream read",
    }
    times = part["seconds"] | part.get("catch_up_seconds", {})
    names |= {
        "get_alone": "GET, one at a time",
        "get_at_once": "GET, several at once",
        "alone": "late reader, one at a time",
        "ahead": "late reader, prefetching",
    }
    title = f"Parts of {_size(part)}: {part['rows']} trajectories"
    table = make_table(title, ("", "ms", "MB/s", "rows/s", "ms/row", "of bound"))
    for name in (name for name in names if name in times):
        seconds = times[name]
        share = part["share"].get(name)
        table.add_row(
            names[name],
            f"{1000 * seconds:.2f}",
            f"{part['bytes'] / seconds / 1e6:,.0f}",
            f"{part['rows'] / seconds:,.0f}",
            f"{1000 * seconds / part['rows']:.4f}",
            "" if share is None else f"{share:.0%}",
        )
    console.print(table)
    for what, shares in part["profile"].items():
        console.print(f"Where a {what} spends its time, including callees:")
        for name, share in shares.items():
            console.print(f"  {share:4.0%}  {name}", markup=False, highlight=False)
    console.print()


def _size(part: dict[str, Any]) -> str:
    return f"{part['bytes'] / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
