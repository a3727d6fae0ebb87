"""What streams cost: durable writes, verified reads, how soon a part is seen, and the same rows in other formats.

    by part size    write beside write + fsync       read beside memcpy       where the time goes
    two processes   from a part's publication until a polling reader has it
    side by side    stream ─ JSON lines ─ msgpack ─ torch.save                (a local store only)

Trajectories have 1,024 response tokens each. A time is the median of several rounds, and a share of a bound the median
of the shares within a round, for each round measures every contender. On `s3://` the bounds are one PUT and one GET of
the client library, and a reader that comes late is measured too, with and without fetching ahead.

    python -m benchmarks.streams [--store URL] [--parts 8 64] [--repeats 15] [--json PATH]

Without `--store`, a temporary folder is used: mind which disk that is, for the bound is its own.
"""

import argparse
import json
import os
import platform
import tempfile
import uuid
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.formats import measure_formats
from benchmarks.parts import measure_parts
from benchmarks.rows import RESPONSE_TOKENS, rows_in
from benchmarks.visibility import measure_visibility
from storage.factory import open_store

TARGETS = {"trajectories_per_second": 10_000, "write_share": 0.8, "read_share": 0.8, "visible_p50_ms": 10.0}
"""For local stores: a write reaches either the rate or its share of the bound, a read its share of memcpy; the median
part is seen within the time."""

_SAMPLES = 300


def main() -> None:
    """Measures, prints the tables and writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", metavar="URL", help="where to write; what is written is deleted again")
    parser.add_argument(
        "--parts", type=float, nargs="+", default=[8, 64], metavar="MB", help="sizes of a part, 10⁶ bytes"
    )
    parser.add_argument("--repeats", type=int, default=15, help="rounds that are counted")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    if arguments.repeats < 1 or min(arguments.parts) <= 0:
        parser.error("expected at least one repeat, and parts larger than 0 MB")
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as folder:
        url = arguments.store or folder
        result = measure(url, arguments.parts, repeats=arguments.repeats, samples=_SAMPLES)
    _print(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(url: str, megabytes: list[float], *, repeats: int, samples: int) -> dict[str, Any]:
    """Every figure, in seconds and bytes where the name says nothing else, for parts of these sizes on the store `url`.

    Visibility, with `samples` parts, and the comparison of formats take the first size.
    """
    store = open_store(url)
    folder = f"benchmark-{uuid.uuid4().hex}"
    local = store.local_path(folder)
    num_rows = [rows_in(size) for size in megabytes]
    try:
        result: dict[str, Any] = {
            "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
            "store": store.url,
            "response_tokens": RESPONSE_TOKENS,
            "parts": [measure_parts(store, f"{folder}/parts-{rows}", rows, repeats) for rows in num_rows],
            "visibility": measure_visibility(store, f"{folder}/visibility", num_rows[0], samples),
        }
        if local is not None:
            result["targets"] = targets_met(result)
            result["formats"] = measure_formats(local / "formats", num_rows[0], max(1, repeats // 3))
    finally:
        store.delete_tree(folder)
    return result


def targets_met(result: dict[str, Any]) -> dict[str, bool]:
    """Which of `TARGETS` the figures of `measure` reach: by part size, and for visibility."""
    met = {}
    for part in result["parts"]:
        size = _size(part)
        for name in ("write", "group_commit"):
            rate = part["rows"] / part["seconds"][name]
            fast = rate >= TARGETS["trajectories_per_second"]
            met[f"{name.replace('_', ' ')}, {size}"] = fast or part["share"][name] >= TARGETS["write_share"]
        met[f"read, bytes verified, {size}"] = part["share"]["bytes"] >= TARGETS["read_share"]
        met[f"read, values checked too, {size}"] = part["share"]["read"] >= TARGETS["read_share"]
    met["visible"] = result["visibility"]["since_published_ms"]["p50"] <= TARGETS["visible_p50_ms"]
    return met


def _print(result: dict[str, Any]) -> None:
    console = Console()
    for part in result["parts"]:
        _print_part(console, part)
    seen = result["visibility"]
    console.print(
        f"Seen by another process (parts of {seen['rows']} rows, polled every {seen['poll_ms']:.0f} ms): "
        f"p50 {seen['since_published_ms']['p50']:.1f} ms, p99 {seen['since_published_ms']['p99']:.1f} ms "
        f"after the record's {seen['published']}; p50 {seen['since_called_ms']['p50']:.1f} ms, "
        f"p99 {seen['since_called_ms']['p99']:.1f} ms after the call of write()\n"
    )
    if "formats" in result:
        _print_formats(console, result["formats"])
    for name, met in result.get("targets", {}).items():
        console.print(f"target {'met   ' if met else 'MISSED'}  {name}")


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
        "ahead": "late reader, fetching ahead",
    }
    table = Table(title=f"Parts of {_size(part)}: {part['rows']} trajectories")
    for heading in ("", "ms", "MB/s", "rows/s", "ms/row", "of bound"):
        table.add_column(heading, justify="right" if heading else "left")
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
        console.print(f"Where a {what} spends its time, callees included:")
        for name, share in shares.items():
            console.print(f"  {share:4.0%}  {name}", markup=False, highlight=False)
    console.print()


def _print_formats(console: Console, result: dict[str, Any]) -> None:
    rows, payload = result["rows"], result["payload"]
    table = Table(title=f"The same {rows} trajectories ({payload / 1e6:.1f} MB of values) in each format")
    for heading in ("", "write ms", "MB/s", "rows/s", "read ms", "MB/s", "rows/s", "bytes/row"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, figures in result["formats"].items():
        cells = [name]
        for what in ("write", "read"):
            seconds = figures[what]
            cells += [f"{1000 * seconds:.1f}", f"{payload / seconds / 1e6:,.0f}", f"{rows / seconds:,.0f}"]
        table.add_row(*cells, f"{figures['bytes'] / rows:,.0f}")
    console.print(table)


def _size(part: dict[str, Any]) -> str:
    return f"{part['bytes'] / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
