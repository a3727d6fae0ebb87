"""A run's trajectories counted again from its files, by json and pyarrow alone."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs


@dataclass(frozen=True, kw_only=True)
class Recount:
    """Trajectories, by the rows of Arrow files that commit records name; tokens are those of their responses."""

    generated: int
    generated_tokens: int | None
    """None if one of the files can't be read."""
    scored: int
    outcomes: Counter[str] | None
    """Surviving rows of `consumed` by outcome; None if one of its files can't be read."""
    trained_tokens: int
    """By the trained trajectories' own rows; 0 if a file can't be read."""
    twice: int
    """Trajectories that survive in more than one row of `consumed`."""

    def __str__(self) -> str:
        outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted((self.outcomes or {}).items()))
        return f"{self.generated:,} generated, {self.scored:,} scored, {outcomes}; {self.twice} of them twice"


def recount(run: Path) -> Recount:
    """Counts the run in the folder `run`. A part that can't be read counts as its record says."""
    streams = run / "streams"
    lengths: dict[tuple[int, int], int] = {}
    generated, all_read = 0, True
    for path in streams.glob("trajectories/*"):
        for rows, table in parts(path):
            generated += rows
            all_read = all_read and table is not None
            if table is not None:
                to_pylist = pc.list_value_length(table["response_tokens"]).to_pylist()
                keys = zip(table["generator"].to_pylist(), table["row_id"].to_pylist(), strict=True)
                lengths.update(zip(keys, to_pylist, strict=True))
    scored = sum(rows for path in streams.glob("scores/*/*/*") for rows, _ in parts(path))
    tables = [table for _, table in parts(streams / "consumed")]
    read = [table for table in tables if table is not None]
    surviving = list(_surviving([row for table in read for row in table.to_pylist()]))
    taken = Counter((row["generator"], row["trajectory_row_id"]) for row in surviving)
    trained = [row for row in surviving if row["outcome"] == "trained"]
    whole = len(read) == len(tables)
    return Recount(
        generated=generated,
        generated_tokens=sum(lengths.values()) if all_read else None,
        scored=scored,
        outcomes=Counter(row["outcome"] for row in surviving) if whole else None,
        trained_tokens=(
            sum(lengths[row["generator"], row["trajectory_row_id"]] for row in trained) if all_read and whole else 0
        ),
        twice=sum(count > 1 for count in taken.values()) if whole else 0,
    )


def check_recount(run: Path, summary: Mapping[str, Any]) -> Recount:
    """Asserts that the ledger in `summary` agrees with the files of the run, as far as they can be read.

    `summary` must be of a run that has ended, so that the stream `consumed` is complete.
    """
    result, ledger = recount(run), summary["ledger"]
    assert result.twice == 0, result
    assert ledger["generated"]["rollouts"] == result.generated, result
    assert ledger["generated"]["rollouts"] - ledger["in_flight"]["rollouts"] == result.scored, result
    if result.generated_tokens is not None:
        assert ledger["generated"]["tokens"] == result.generated_tokens, result
    if result.outcomes is not None:
        counted = {"trained": ledger["trained"], **ledger["dropped"]}
        assert {name: amount["rollouts"] for name, amount in counted.items() if amount["rollouts"]} == result.outcomes
    if result.trained_tokens:
        assert ledger["trained"]["tokens"] == result.trained_tokens, result
    return result


def copied_from_s3(url: str, endpoint: str, key: str, secret: str, to: Path) -> Path:
    """The run at `url`, copied into the folder `to` by Arrow's own client."""
    s3 = pafs.S3FileSystem(access_key=key, secret_key=secret, endpoint_override=endpoint, region="us-east-1")
    pafs.copy_files(
        url.removeprefix("s3://"), str(to), source_filesystem=s3, destination_filesystem=pafs.LocalFileSystem()
    )
    return to


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
            with (stream / values["file"]).open("rb") as file:
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
