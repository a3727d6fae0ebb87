"""What all benchmarks share: the command line, and the report as tables and as JSON."""

import argparse
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PRESET = Path("configs/presets/tiny-cpu.yaml")


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with `--json`; `doc` is the benchmark's docstring, shown by `--help`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the figures")
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds `--set`, for benchmarks that run campaigns."""
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="change keys of the config"
    )


def machine() -> dict[str, Any]:
    """The machine that the figures were measured on."""
    return {"platform": platform.platform(), "cores": os.cpu_count()}


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Writes the figures where `--json` says; nothing without it."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


def make_table(title: str, headings: Iterable[str]) -> Table:
    """An empty table of numbers; a column without a heading holds names."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    return table


def print_targets(console: Console, targets: Mapping[str, bool]) -> None:
    """One line per target."""
    for name, met in targets.items():
        console.print(f"target {'met   ' if met else 'MISSED'}  {name}")
