"""`millrace inspect | fsck | compact | gc | export`: their command lines, and what they print.

What a run holds was written by a model, by the people who gave it prompts, and perhaps by a damaged disk: nothing of it
reaches the terminal as a control character, or as markup.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.terminal import local_time, new_table, plain

if TYPE_CHECKING:
    from millrace.care.gc import Plan
    from millrace.care.inspect import FilesSummary, FirstRows, RunSummary, StreamSummary

DAMAGED = 1
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_CELL_WIDTH = 24
_FILES_SHOWN = 5


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the five commands."""
    inspect = _command(commands, "inspect", "show what a run holds: streams, checkpoints, weights, first rows")
    inspect.add_argument("--stream", metavar="NAME", help="show the first rows of this stream, such as trajectories/0")
    inspect.add_argument("--rows", type=_count, default=5, metavar="N", help="how many of them (default: 5)")
    inspect.add_argument("--json", action="store_true", help="everything, as JSON")
    fsck = _command(commands, "fsck", "verify every record and file of a run; exit code 1 if anything is damaged")
    fsck.add_argument("--quarantine", action="store_true", help="move damaged files aside, so that the run goes on")
    fsck.add_argument("--json", action="store_true", help="everything, as JSON")
    compact = _command(commands, "compact", "write a run as Parquet files for analysis; those there are replaced")
    compact.add_argument("--out", metavar="URL", help="folder or URL to write to (default: parquet/ in the run)")
    gc = _command(commands, "gc", "remove what a run no longer needs; with no limit given, no rows")
    gc.add_argument("--keep-age", type=_seconds, metavar="AGE", help="keep rows younger than this, such as 7d or 12h")
    gc.add_argument("--keep-versions", type=_count, metavar="N", help="keep rows of the N newest policy versions")
    gc.add_argument("--max-bytes", type=_size, metavar="SIZE", help="then keep at most so much of rows, such as 10GB")
    gc.add_argument(
        "--keep-checkpoints",
        type=_count,
        default=2,
        metavar="N",
        help="keep the N newest checkpoints, and the N newest promoted ones (default: 2)",
    )
    gc.add_argument("--dry-run", action="store_true", help="show what would be removed, and remove nothing")
    export = _command(commands, "export", "write a checkpoint as a Hugging Face folder")
    export.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder to make; new, or empty")
    which = export.add_mutually_exclusive_group()
    which.add_argument("--version", type=int, metavar="N", help="policy version to export (default: the newest stored)")
    which.add_argument("--promoted", action="store_true", help="the checkpoint that was promoted last")


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Runs one of the five; returns its exit code. Raises InputError and StorageError: a mistake, or damage."""
    console = console or Console()
    commands = {"inspect": _inspect, "fsck": _fsck, "compact": _compact, "gc": _gc, "export": _export}
    return commands[arguments.command](arguments, console)


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, what: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("run_url", metavar="RUN_URL", help="folder or URL of the run: ROOT/RUN_ID")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count: expected a whole number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    return _quantity(text, _SECONDS, "an age", "7d")


def _size(text: str) -> int:
    return int(_quantity(text, _BYTES, "a size", "10GB"))


def _quantity(text: str, units: Mapping[str, int], what: str, example: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text)
    if found is None or found[2] not in units:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {what}: expected a number and one of {', '.join(units)}, such as {example}"
        )
    return float(found[1]) * units[found[2]]


def _inspect(arguments: argparse.Namespace, console: Console) -> int:
    from millrace.care.inspect import first_rows, inspect
    from storage.factory import open_store

    store = open_store(arguments.run_url)
    rows = None if arguments.stream is None else first_rows(store, arguments.stream, arguments.rows)
    if arguments.json:
        found = asdict(inspect(store)) | ({} if rows is None else {"first_rows": asdict(rows)})
        print(json.dumps(found, indent=1))
    elif rows is None:
        _print_summary(inspect(store), console)
    else:
        _print_rows(rows, console)
    return 0


def _fsck(arguments: argparse.Namespace, console: Console) -> int:
    from millrace.care.fsck import fsck
    from storage.factory import open_store

    report = fsck(open_store(arguments.run_url), quarantine=arguments.quarantine)
    if arguments.json:
        print(json.dumps(asdict(report) | {"damaged": report.damaged}, indent=1))
        return DAMAGED if report.damaged else 0
    for finding in report.findings:
        named_by = "" if finding.record is None else f" (named by record {finding.record})"
        style = "bold red" if finding.level == "damaged" else ""
        _say(console, f"{finding.level}: {finding.file}{named_by}: {finding.reason}", style)
    removed = f" ({report.removed_parts:,} more were removed by gc)" if report.removed_parts else ""
    _say(
        console,
        f"{report.streams:,} streams, {report.records:,} records, {report.parts:,} parts{removed}, "
        f"{report.checkpoints:,} checkpoints, {_bytes(report.bytes)} verified; {report.damaged} damaged",
    )
    movable = sum(finding.level == "damaged" and finding.movable for finding in report.findings)
    files = f"{movable} damaged file{'s' if movable > 1 else ''}"
    if movable and arguments.quarantine:
        _say(console, f"{files} moved to quarantine/: the run goes on without")
    elif movable:
        _say(console, f"{files} can be moved aside by --quarantine, so that the run goes on without")
    return DAMAGED if report.damaged else 0


def _compact(arguments: argparse.Namespace, console: Console) -> int:
    from millrace.care.compact import compact
    from storage.factory import open_store

    store = open_store(arguments.run_url)
    out = None if arguments.out is None else open_store(arguments.out)
    done = compact(store, out)
    for problem in done.problems:
        _say(console, f"left out: {problem}", "bold red")
    for file in done.files:
        _say(console, f"{file.path}: {file.rows:,} rows, {_bytes(file.bytes)}")
    missing = f"; {done.missing_rows:,} more are gone or damaged" if done.missing_rows else ""
    unscored = f", {done.unscored_rows:,} of them without a score" if done.unscored_rows else ""
    _say(console, f"{done.rows:,} trajectories{unscored}{missing}, at {(out or store).url}")
    return 0


def _gc(arguments: argparse.Namespace, console: Console) -> int:
    from millrace.care.gc import Retention, carry_out, plan
    from storage.factory import open_store

    store = open_store(arguments.run_url)
    made = plan(
        store,
        Retention(
            keep_age=arguments.keep_age,
            keep_versions=arguments.keep_versions,
            max_bytes=arguments.max_bytes,
            keep_checkpoints=arguments.keep_checkpoints,
        ),
    )
    for removal in made.removals:
        _say(console, f"{removal.kind}: {removal.path}: {_bytes(removal.bytes)}, {removal.reason}")
    if not arguments.dry_run:
        carry_out(store, made)
    console.print(_freed(made, dry_run=arguments.dry_run))
    for note in made.notes:
        _say(console, note, "bold red")
    return 0


def _export(arguments: argparse.Namespace, console: Console) -> int:
    from storage.factory import open_store

    store = open_store(arguments.run_url)
    if arguments.promoted:
        from millrace.promotion import fetch_promoted

        sentence = fetch_promoted(store, arguments.to).sentence
    else:
        from flows.export import export_checkpoint

        sentence = f"version {export_checkpoint(store, arguments.to, arguments.version)}"
    _say(console, f"{sentence}; written to {arguments.to}")
    return 0


def _freed(plan: "Plan", *, dry_run: bool) -> Table:
    from millrace.care.gc import KINDS

    made = new_table("would be freed" if dry_run else "freed", left=("what",), right=("files", "size"))
    freed = plan.freed()
    for kind in KINDS:
        made.add_row(kind, f"{sum(removal.kind == kind for removal in plan.removals):,}", _bytes(freed[kind]))
    made.add_section()
    made.add_row("all", f"{len(plan.removals):,}", _bytes(freed.total()))
    return made


def _print_summary(summary: "RunSummary", console: Console) -> None:
    _say(console, f"run {summary.run_id} at {summary.run_url}: {_bytes(summary.bytes)}")
    rows = new_table("streams", left=("stream",), right=("parts", "rows", "tokens", "size", "versions"))
    writers = new_table(
        "writers", left=("stream", "first commit", "last commit", "state"), right=("removed", "epochs", "schema")
    )
    for stream in summary.streams:
        name = plain(stream.name)
        counts = (f"{count:,}" for count in (stream.parts, stream.rows, stream.tokens))
        versions = _range(stream.min_policy_version, stream.max_policy_version)
        rows.add_row(name, *counts, _bytes(stream.bytes), versions)
        schema = ", ".join(map(str, stream.schema_versions)) or "–"
        times = (_time(stream.t_first), _time(stream.t_last))
        removed = f"{stream.removed_parts:,} parts" if stream.removed_parts else "–"
        writers.add_row(name, *times, _state(stream), removed, str(stream.epochs), schema)
    console.print(rows)
    console.print(writers)
    kinds = (
        ("checkpoints", summary.checkpoints),
        ("weights in the store", summary.weights),
        ("promoted", summary.promoted),
    )
    for title, files in kinds:
        if files:
            console.print(_files_table(title, files))
    histogram = "  ".join(f"{staleness}: {count:,}" for staleness, count in summary.staleness.items())
    if histogram:
        _say(console, f"trained rollouts by staleness, as of the latest checkpoint:  {histogram}")
    for problem in (*summary.problems, *(stream.problem for stream in summary.streams)):
        if problem is not None:
            _say(console, f"damaged: {problem}", "bold red")


def _range(first: int | None, last: int | None) -> str:
    return "–" if first is None else f"{first} to {last}"


def _state(stream: "StreamSummary") -> str:
    return "damaged" if stream.problem is not None else "ended" if stream.ended else "open"


def _files_table(title: str, files: "Sequence[FilesSummary]") -> Table:
    some = f", the last {_FILES_SHOWN} of {len(files):,}" if len(files) > _FILES_SHOWN else ""
    made = new_table(f"{title}{some}", left=("files",), right=("version", "incarnation", "size"))
    for one in files[-_FILES_SHOWN:]:
        made.add_row("there" if one.present else "not there", str(one.step), str(one.incarnation), _bytes(one.bytes))
    return made


def _print_rows(found: "FirstRows", console: Console) -> None:
    """A line a column, a column a row: there are more columns than a terminal is wide."""
    at_once = max(1, (console.width - _CELL_WIDTH) // (_CELL_WIDTH + 2))
    for first in range(0, len(found.rows), at_once):
        shown = found.rows[first : first + at_once]
        made = new_table(found.stream, left=("column", *(f"row {first + i}" for i in range(len(shown)))), right=())
        for name in shown[0]:
            made.add_row(name, *(_cell(row[name]) for row in shown))
        console.print(made)
    if not found.rows:
        _say(console, f"{found.stream} has no rows that can be read")
    for problem in found.problems:
        _say(console, f"damaged: {problem}", "bold red")


def _cell(value: Any) -> Text:
    if isinstance(value, list):
        return _shortened(f"[{len(value)}] " + " ".join(_number(item) for item in value[:_CELL_WIDTH]))
    return _shortened("–" if value is None else _number(value))


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)


def _shortened(text: str) -> Text:
    cell = plain(text[: _CELL_WIDTH + 1])
    cell.truncate(_CELL_WIDTH, overflow="ellipsis")
    return cell


def _say(console: Console, line: str, style: str = "") -> None:
    text = plain(line)
    text.stylize(style)
    console.print(text, soft_wrap=True)


def _bytes(count: int) -> str:
    unit = next((name for name in ("GB", "MB", "kB") if count >= _BYTES[name]), "B")
    return f"{count} B" if unit == "B" else f"{count / _BYTES[unit]:.1f} {unit}"


def _time(t: float | None) -> str:
    return "–" if t is None else local_time(t)
