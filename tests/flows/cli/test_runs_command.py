"""Output of `millrace runs`."""

import json
from pathlib import Path

import pytest
from support.campaigns.command import run_command
from support.stored_run.run import Shape, StoredRun

from millrace.errors import InputError
from millrace.evaluation.results import write_result
from storage import layout
from storage.stores.local import LocalStore


def store_run(root: Path, run_id: str, steps: int, *, t_started: float) -> StoredRun:
    stored = StoredRun(LocalStore(root / run_id, fsync=False), run_id, Shape(steps=10))
    record = json.loads(bytes(stored.store.get(layout.RUN)))
    stored.store.put(layout.RUN, json.dumps({**record, "t_started": t_started}).encode())
    if steps:
        stored.append(steps)
    return stored


def printed(url: Path) -> list[str]:
    code, text = run_command("runs", str(url), width=80)
    assert code == 0
    return [line.strip() for line in text.splitlines()]


def test_runs_are_rows_of_80_columns_the_one_started_last_first(tmp_path: Path) -> None:
    run_id = "tiny-cpu-20261123-221041"
    store_run(tmp_path, "older", 3, t_started=1_000_000.0).finish()
    newer = store_run(tmp_path, run_id, 2, t_started=2_000_000.0)
    write_result(newer.store, {"policy_version": 4000, "accuracy": 0.5703, "prompts": 64, "t": 1.0})
    rows = [line.split() for line in printed(tmp_path) if line.startswith(("older", run_id))]
    assert rows[0][:5] == [run_id, "running", "2/10", "0.570", "v4000"]
    assert rows[1][:4] == ["older", "finished", "3/10", "–"], "it was not evaluated"


def test_runs_that_cannot_be_read_are_listed_last_with_the_reason(tmp_path: Path) -> None:
    store_run(tmp_path, "fine", 2, t_started=2_000_000.0)
    partly = store_run(tmp_path, "partly", 2, t_started=1_000_000.0)
    partly.finish()
    partly.store.delete(layout.progress("train", 0))
    torn = store_run(tmp_path, "torn", 2, t_started=1_000_000.0)
    torn.store.put(layout.RUN, b'{"run_id": "run", "config": "[red]\x1b[2J"}')
    (tmp_path / "creating").mkdir()
    lines = printed(tmp_path)
    assert any(line.startswith("fine") and "2/10" in line for line in lines)
    assert any(line.startswith("partly") and "finished" in line and "–/10" in line for line in lines)
    assert [line.split()[0] for line in lines if line.endswith(" –")] == ["creating", "torn"]
    assert "creating: no run.json yet: being created, or not a run" in lines
    assert any(line.startswith("torn: ") and layout.RUN in line for line in lines)
    assert any(line.startswith("partly: ") and layout.progress("train", 0) in line for line in lines)
    assert "\x1b" not in "".join(lines)


def test_a_folder_without_runs_says_so_and_a_file_is_refused(tmp_path: Path) -> None:
    assert printed(tmp_path / "none") == [f"No runs in {tmp_path / 'none'}."]
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError):
        printed(tmp_path / "file")
