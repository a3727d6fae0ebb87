"""Output and exit codes of `millrace inspect`, `fsck`, `compact`, `gc` and `export`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.campaigns.command import run_command

from millrace.errors import InputError, RunMissing
from millrace.evaluation.promotion import new_folder
from storage import layout
from storage.errors import StoreRefused
from storage.schema import METRIC
from storage.stores.local import LocalStore
from storage.streams.stream import StreamWriter


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


def test_inspect_shows_streams_checkpoints_and_weights(folder: str) -> None:
    code, text = run_command("inspect", folder)
    assert code == 0
    assert text.startswith(f"run small at {folder}: ")
    assert ["scores/exact_match/1/0-of-2", "6", "12"] in [line[:3] for line in lines(text)]
    assert ["trajectories/0", "13", "38"] in [line[:3] for line in lines(text)]
    assert "checkpoints, the last 5 of 6" in text
    assert ["there", "6", "0", "216", "bytes"] in lines(text)


def test_inspect_as_json_includes_the_requested_rows(folder: str) -> None:
    code, text = run_command("inspect", folder, "--json", "--stream", "trajectories/1", "--rows", "2")
    summary = json.loads(text)
    assert (code, summary["run_id"], len(summary["streams"])) == (0, "small", 9)
    assert [row["row_id"] for row in summary["first_rows"]["rows"]] == [0, 1]


def test_rows_are_shown_one_line_per_column(folder: str) -> None:
    code, text = run_command("inspect", folder, "--stream", "trajectories/0", "--rows", "2")
    assert code == 0
    assert [line[1:] for line in lines(text) if line[:1] == ["row_id"]] == [["0", "1"]]
    assert next(line[1:] for line in lines(text) if line[:1] == ["response_tokens"]) == ["[1]", "3", "[2]", "4", "5"]


def test_control_characters_and_markup_of_a_run_are_escaped(folder: str) -> None:
    hostile = "\x1b[2J\x07[red]\u202e\r\nname" + "n" * 5000
    row = {"t": 1.5, "incarnation": 0, "policy_version": 1, "name": hostile, "value": 1.0}
    writer = StreamWriter(LocalStore(folder), layout.metrics("train", 1), METRIC, "w")
    writer.write(pa.Table.from_pylist([row], schema=METRIC), tokens=0)
    _, text = run_command("inspect", folder, "--stream", "metrics/train-1")
    assert r"\x1b[2J\x07[red]" in text
    assert "n" * 100 not in text, "a long value is shortened"
    assert not [c for c in text if not c.isprintable() and c != "\n"]


def test_fsck_reports_and_quarantines_damage(folder: str) -> None:
    code, text = run_command("fsck", folder)
    assert (code, len(text.splitlines())) == (0, 1)
    path = segment(folder, "streams/trajectories/0")
    damage(path)
    code, text = run_command("fsck", folder)
    assert code == 1
    relative = path.relative_to(folder)
    assert f"damaged: {relative} (named by record " in text
    assert "1 damaged" in text
    assert "1 damaged file can be moved aside by --quarantine" in text
    code, text = run_command("fsck", folder, "--json")
    assert (code, json.loads(text)["damaged"]) == (1, 1)
    code, text = run_command("fsck", folder, "--quarantine")
    assert (code, "1 damaged file moved to quarantine/" in text) == (1, True)
    code, text = run_command("fsck", folder)
    assert (code, f"set aside: {relative} (named by record " in text) == (0, True)


def test_compact_lists_files_and_unreadable_parts(folder: str, tmp_path: Path) -> None:
    damage(segment(folder, "streams/metrics/train-0"))
    code, text = run_command("compact", folder, "--out", str(tmp_path / "out"))
    assert code == 0
    assert "left out: streams/metrics/train-0/seg/" in text
    assert "trajectories-00000.parquet: 74 rows" in text
    assert f"74 trajectories, at {tmp_path / 'out'}" in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "consumed-00000.parquet",
        "metrics-00000.parquet",
        "trajectories-00000.parquet",
    ]


def test_gc_lists_removals_with_and_without_dry_run(folder: str) -> None:
    files = {path for path in Path(folder).rglob("*") if path.is_file()}
    _, dry = run_command("gc", folder, "--keep-age", "0s", "--dry-run")
    assert {path for path in Path(folder).rglob("*") if path.is_file()} == files
    code, wet = run_command("gc", folder, "--keep-age", "0s")
    assert code == 0
    planned, listed = (
        [line for line in text.splitlines() if line.startswith(("rows: ", "checkpoints: ", "weights: "))]
        for text in (dry, wet)
    )
    gone = {path.relative_to(folder).as_posix() for path in files if not path.exists()}
    assert {line.split(": ")[1] for line in planned} == {line.split(": ")[1] for line in listed} == gone
    assert "would be freed" in dry
    assert ["all", str(len(gone))] in [line[:2] for line in lines(wet)]


def test_an_unknown_run_or_stream_is_refused(folder: str, tmp_path: Path) -> None:
    for command in ("inspect", "fsck", "compact", "gc"):
        with pytest.raises(RunMissing):
            run_command(command, str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    with pytest.raises(InputError) as raised:
        run_command("inspect", folder, "--stream", "x")
    assert "trajectories/0" in str(raised.value.expected)


def test_export_writes_the_promoted_model(start_run: Callable[..., Any], tmp_path: Path) -> None:
    url, model = str(tmp_path / "run"), tmp_path / "model"
    run = start_run(LocalStore(tmp_path / "run", fsync=False)).campaign()
    with pytest.raises(InputError):
        run_command("export", url, "--promoted", "--to", str(model))
    run.promote()
    code, text = run_command("export", url, "--promoted", "--to", str(model))
    assert (code, text) == (0, f"better; written to {model}\n")
    assert (model / "model.safetensors").read_bytes() == b"promoted 6" * 9
    assert ["promoted"] in lines(run_command("inspect", url)[1])


def test_a_place_that_cannot_be_written_is_a_mistake_of_the_user(folder: str) -> None:
    with pytest.raises(StoreRefused) as caught:
        run_command("compact", folder, "--out", "/proc/x")
    assert caught.value.file == "/proc/x"
    with pytest.raises(InputError) as refused, new_folder(Path("/proc/x")):
        pass
    assert refused.value.file == "/proc/x"
