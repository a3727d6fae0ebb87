"""The maintenance commands: their output, their exit codes, and escaping for the terminal."""

import argparse
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from flows.cli.maintenance import add_parsers, run
from millrace.errors import InputError, RunMissing
from storage import layout
from storage.schema import METRIC
from storage.stores.local import LocalStore
from storage.streams.stream import StreamWriter


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers(dest="command", required=True))
    return parser.parse_args(words)


def said(*words: str) -> tuple[int, str]:
    """Exit code and output on a terminal of 100 columns."""
    console = Console(file=io.StringIO(), width=100)
    code = run(parse(*words), console)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@pytest.fixture
def folder(start_run: Callable[..., Any], tmp_path: Path) -> str:
    """A campaign of six versions in a folder."""
    start_run(LocalStore(tmp_path / "run", fsync=False)).campaign()
    return str(tmp_path / "run")


def segment(folder: str, stream: str) -> Path:
    return min((Path(folder) / stream / "seg").iterdir())


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_inspect_shows_streams_checkpoints_weights_and_staleness(folder: str) -> None:
    code, text = said("inspect", folder)
    assert code == 0
    assert text.startswith(f"run small at {folder}: ")
    assert ["scores/exact_match/1/0-of-2", "6", "12"] in [line[:3] for line in lines(text)]
    assert ["trajectories/0", "13", "38"] in [line[:3] for line in lines(text)]
    assert "checkpoints, the last 5 of 6" in text
    assert ["there", "6", "0", "216", "B"] in lines(text)
    assert "trained trajectories by staleness, at the latest checkpoint:  0: " in text


def test_inspect_prints_json(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(parse("inspect", folder, "--json", "--stream", "trajectories/1", "--rows", "2")) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["run_id"], len(values["streams"])) == ("small", 9)
    assert [row["row_id"] for row in values["first_rows"]["rows"]] == [0, 1]


def test_rows_are_shown_one_line_per_column(folder: str) -> None:
    code, text = said("inspect", folder, "--stream", "trajectories/0", "--rows", "4")
    assert code == 0
    assert [line[1:] for line in lines(text) if line[:1] == ["row_id"]] == [["0", "1"], ["2", "3"]]
    assert next(line[1:] for line in lines(text) if line[:1] == ["response_tokens"]) == ["[1]", "3", "[2]", "4", "5"]


def test_control_characters_and_markup_of_a_run_are_escaped(folder: str) -> None:
    hostile = "\x1b[2J\x07[red]\u202e\r\nname" + "n" * 5000
    row = {"t": 1.5, "incarnation": 0, "policy_version": 1, "name": hostile, "value": 1.0}
    writer = StreamWriter(LocalStore(folder), layout.metrics("train", 1), METRIC, "w")
    writer.write(pa.Table.from_pylist([row], schema=METRIC), tokens=0)
    _, text = said("inspect", folder, "--stream", "metrics/train-1")
    assert r"\x1b[2J\x07[red]" in text
    assert "n" * 100 not in text, "a long value is shortened"
    assert not [c for c in text if not c.isprintable() and c != "\n"]


def test_fsck_reports_and_quarantines_damage(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said("fsck", folder)
    assert (code, len(text.splitlines())) == (0, 1)
    path = segment(folder, "streams/trajectories/0")
    damage(path)
    (Path(folder) / "notes.txt").write_text("mine")
    code, text = said("fsck", folder)
    assert code == 1
    relative = path.relative_to(folder)
    assert f"damaged: {relative} (named by record " in text
    assert "note: notes.txt: not a file of a run" in text
    assert "1 damaged" in text
    assert "1 damaged file can be moved aside by --quarantine" in text
    assert run(parse("fsck", folder, "--json")) == 1
    assert json.loads(capsys.readouterr().out)["damaged"] == 1
    code, text = said("fsck", folder, "--quarantine")
    assert (code, "1 damaged file moved to quarantine/" in text) == (1, True)
    code, text = said("fsck", folder)
    assert (code, f"set aside: {relative} (named by record " in text) == (0, True)


def test_compact_lists_files_and_unreadable_parts(folder: str, tmp_path: Path) -> None:
    damage(segment(folder, "streams/metrics/train-0"))
    code, text = said("compact", folder, "--out", str(tmp_path / "out"))
    assert code == 0
    assert "left out: streams/metrics/train-0/seg/" in text
    assert "trajectories-00000.parquet: 74 rows, " in text
    assert f"74 trajectories, 2 of them without a score, at {tmp_path / 'out'}" in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "consumed-00000.parquet",
        "metrics-00000.parquet",
        "trajectories-00000.parquet",
    ]


def test_gc_lists_removals_with_and_without_dry_run(folder: str) -> None:
    files = {path for path in Path(folder).rglob("*") if path.is_file()}
    _, dry = said("gc", folder, "--keep-age", "0s", "--dry-run")
    assert {path for path in Path(folder).rglob("*") if path.is_file()} == files
    code, wet = said("gc", folder, "--keep-age", "0s")
    assert code == 0
    listed, planned = (
        [line for line in text.splitlines() if line.startswith(("rows: ", "checkpoints: ", "weights: "))]
        for text in (wet, dry)
    )
    assert listed == planned
    gone = {path.relative_to(folder).as_posix() for path in files if not path.exists()}
    assert {line.split(": ")[1] for line in listed} == gone
    assert "would be freed" in dry
    assert ["all", str(len(gone))] in [line[:2] for line in lines(wet)]


def test_quantities_are_a_number_and_a_unit() -> None:
    for words, expected in (
        ("--keep-age 7d", 7 * 86400.0),
        ("--keep-age 1.5h", 5400.0),
        ("--max-bytes 10GB", 10**10),
        ("--max-bytes 1.5KiB", 1536),
        ("--keep-versions 3", 3),
    ):
        option, value = words.split()
        assert getattr(parse("gc", "run", option, value), option[2:].replace("-", "_")) == expected


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("gc run --keep-age 7", "'7' is not an age: expected a number and one of s, m, h, d, w, such as 7d"),
        ("gc run --keep-age -1d", "expected one argument"),
        ("gc run --max-bytes 10gb", "'10gb' is not a size: expected a number and one of B, kB, MB"),
        ("gc run --keep-versions 0", "'0' is not a count: expected a whole number of at least 1"),
        ("gc run --keep-checkpoints 0", "'0' is not a count"),
        ("inspect run --rows many", "'many' is not a count"),
    ],
)
def test_invalid_arguments_exit_with_2(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*words.split())
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


def test_an_unknown_run_or_stream_is_refused(folder: str, tmp_path: Path) -> None:
    for command in ("inspect", "fsck", "compact", "gc"):
        with pytest.raises(RunMissing):
            run(parse(command, str(tmp_path / "none")))
    assert not (tmp_path / "none").exists()
    with pytest.raises(InputError) as raised:
        said("inspect", folder, "--stream", "x")
    assert "trajectories/0" in str(raised.value.expected)


def test_export_writes_the_promoted_model(start_run: Callable[..., Any], tmp_path: Path) -> None:
    run_of = start_run(LocalStore(tmp_path / "run", fsync=False)).campaign()
    with pytest.raises(InputError):
        said("export", str(tmp_path / "run"), "--promoted", "--to", str(tmp_path / "model"))
    run_of.promote()
    code, text = said("export", str(tmp_path / "run"), "--promoted", "--to", str(tmp_path / "model"))
    assert (code, text) == (0, f"better; written to {tmp_path / 'model'}\n")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == b"promoted 6" * 9
    assert ["promoted"] in lines(said("inspect", str(tmp_path / "run"))[1])
