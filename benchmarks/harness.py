"""The frame of every benchmark: its command line, rounds in turns, campaigns, and the report as tables and as JSON.

round 0 (not counted)   a b c
round 1                 b c a        every round runs all contenders, each time in another order;
round 2                 c a b        ratios are computed within a round, and their median is reported
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from storage import layout
from storage.stores.factory import open_store
from storage.streams.stream import StreamReader

PRESET = "configs/presets/tiny-cpu.yaml"

Prepare = Callable[[], Callable[[], object]]
"""Prepares a contender, untimed, and returns the call to be timed."""

_TABLE_WIDTH = 150
_LOG_CHARACTERS = 4000


# ---- command line ----


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with `--json`; `doc` is the benchmark's docstring, shown by `--help`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the figures")
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds `--set`, for benchmarks that run campaigns."""
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="change keys of the config"
    )


# ---- rounds ----


def time_in_turn(contenders: Mapping[str, Prepare], turn: int) -> dict[str, float]:
    """Runs one round, number `turn`. Returns the seconds of each contender's call."""
    names = list(contenders)
    first = turn % len(names)
    return {name: _time_call(contenders[name]()) for name in names[first:] + names[:first]}


def time_rounds(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each call in each round, after one round to warm up."""
    contenders: dict[str, Prepare] = {name: lambda call=call: call for name, call in calls.items()}  # type: ignore[misc]
    return transpose([time_in_turn(contenders, turn) for turn in range(rounds + 1)][1:])


def transpose(rounds: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Turns rounds of named values into a list of values by name."""
    return {name: [values[name] for values in rounds] for name in rounds[0]}


def median_ratio(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    """Returns the median of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def _time_call(call: Callable[[], object]) -> float:
    # The returned value is freed after the end time is taken.
    start = time.perf_counter()
    returned = call()
    end = time.perf_counter()
    del returned
    return end - start


# ---- campaigns ----


def as_settings(values: Mapping[str, object]) -> list[str]:
    """Formats config values by key as arguments of `--set`."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def campaign_command(
    run: Path, settings: Iterable[str], *flags: str, config: str | Path = PRESET, module: str = "flows.cli.main"
) -> list[str]:
    """Returns the command that runs a campaign in the folder `run`."""
    sets = [word for setting in settings for word in ("--set", setting)]
    place = ["--root", str(run.parent), "--run-id", run.name]
    return [sys.executable, "-m", module, "run", str(config), *place, *sets, *flags]


def campaign_environment(root: Path) -> dict[str, str]:
    """Returns the environment without the user's Prefect settings; Prefect's database is in `root`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**environment, "PREFECT_HOME": str(root / "prefect")}


def run_campaign(
    run: Path,
    settings: Iterable[str] = (),
    *,
    config: str | Path = PRESET,
    module: str = "flows.cli.main",
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs a campaign in the folder `run` and returns its summary. A finished campaign is not run again.

    Raises RuntimeError with the end of its output if it fails.
    """
    if not (run / layout.SUMMARY).exists():
        shutil.rmtree(run, ignore_errors=True)
        run.parent.mkdir(parents=True, exist_ok=True)
        command = campaign_command(run, settings, config=config, module=module)
        run_logged(
            command, run.with_name(f"{run.name}.log"), campaign_environment(run.parent) | dict(environment or {})
        )
    summary: dict[str, Any] = json.loads((run / layout.SUMMARY).read_text())
    return summary


def run_logged(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    """Runs a command whose output goes to the file `log`. Raises RuntimeError with its end if the command fails."""
    print(f"running {log.stem}; its output is in {log}", file=sys.stderr)
    with log.open("w") as output:
        code = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise RuntimeError(f"{log.stem} ended with exit code {code}:\n{log.read_text()[-_LOG_CHARACTERS:]}")


def read_rows(run: Path, path: str, schema: pa.Schema) -> pa.Table:
    """Reads all rows of a stream of a run."""
    reader = StreamReader(open_store(str(run)), path, schema)
    return pa.concat_tables(part.table for part in reader.readable())


# ---- report ----


def print_line(text: str) -> None:
    """Prints a line of the report, without wrapping it."""
    _console().print(text, soft_wrap=True)


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table of numbers; a column without a heading holds names."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def finish(path: Path | None, result: Mapping[str, Any]) -> None:
    """Prints whether each of the result's `targets` is met, and writes the result to the file of `--json`."""
    for name, met in result.get("targets", {}).items():
        print_line(f"target {'met   ' if met else 'MISSED'}  {name}")
    write_json(path, result)


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Writes the result and facts about this machine; does nothing without a path."""
    if path is not None:
        machine = {
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "torch": version("torch"),
        }
        path.write_text(json.dumps({"machine": machine, **result}, indent=1) + "\n")


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)
