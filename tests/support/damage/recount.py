"""A run counted again from its files, by json and pyarrow alone: what was generated, scored, trained and dropped."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class Recount:
    """Trajectories, by the rows of Arrow files that commit records name."""

    generated: int
    scored: int
    outcomes: Counter[str] | None
    """Surviving rows of `consumed` by outcome; None if one of its files can't be read."""
    twice: int
    """Trajectories that are trained more than once."""


def recount(run: Path) -> Recount:
    """Counts the run in the folder `run`. A part that can't be read counts as its record says."""
    streams = run / "streams"
    generated = sum(rows for path in streams.glob("trajectories/*") for rows, _ in parts(path))
    scored = sum(rows for path in streams.glob("scores/*/*/*") for rows, _ in parts(path))
    tables = [table for _, table in parts(streams / "consumed")]
    if any(table is None for table in tables):
        return Recount(generated=generated, scored=scored, outcomes=None, twice=0)
    rows = [row for table in tables for row in table.to_pylist()]
    surviving = list(_surviving(rows))
    trained = Counter((row["generator"], row["trajectory_row_id"]) for row in surviving if row["outcome"] == "trained")
    return Recount(
        generated=generated,
        scored=scored,
        outcomes=Counter(row["outcome"] for row in surviving),
        twice=sum(count > 1 for count in trained.values()),
    )


def parts(stream: Path) -> Iterator[tuple[int, pa.Table | None]]:
    """(rows, table) of each committed part, in order; the table is None if its file can't be read."""
    for record in sorted((stream / "log").glob("*.json")):
        try:
            values: dict[str, Any] = json.loads(record.read_bytes())
        except (OSError, ValueError):
            continue
        if not isinstance(values, dict) or values.get("kind") != "data":
            continue
        try:
            with (stream / values["seg"]).open("rb") as file:
                yield values["rows"], pa.ipc.open_stream(file).read_all()
        except (OSError, pa.ArrowException):
            yield values["rows"], None


def _surviving(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of steps that no later trainer made again."""
    firsts: dict[int, int] = {}
    for row in rows:
        incarnation = row["incarnation"]
        firsts[incarnation] = min(firsts.get(incarnation, row["policy_version"]), row["policy_version"])
    for row in rows:
        later = [first for incarnation, first in firsts.items() if incarnation > row["incarnation"]]
        if all(row["policy_version"] < first for first in later):
            yield row
