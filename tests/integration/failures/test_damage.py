"""Stored runs with damage in them, gone on with: what is damaged is set aside, said and counted, never trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.campaigns.campaigns import Millrace, assert_balanced

from storage import layout
from storage.checkpoints import CheckpointWriter, load_file, read_latest
from storage.stores.factory import open_store
from storage.streams.log import LogReader
from storage.streams.record import Record

pytestmark = pytest.mark.campaign

MORE = {"training.max_steps": 9}


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def records(run: Path, stream: str) -> list[Record]:
    return list(iter(LogReader(open_store(str(run)), stream).next, None))


def next_part(run: Path) -> Record:
    """The first part of trajectories that the trainer has not touched."""
    checkpoint = read_latest(open_store(str(run)))
    assert checkpoint is not None
    stream: dict[str, Any] = checkpoint.state["intake"][0]
    touched = [entry["part"] for entry in stream["taken_of_parts"]]
    wanted = max(touched, default=stream["trajectories"]["part"] - 1) + 1
    (record,) = [r for r in records(run, layout.trajectories(0)) if r.kind == "data" and r.part == wanted]
    return record


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], prefect_api: str) -> Path:
    """A campaign that came to its end, to be copied."""
    millrace = Millrace(tmp_path_factory.mktemp("runs"), {**environment, "PREFECT_API_URL": prefect_api})
    ended = millrace.run(*millrace.campaign("hurt"))
    assert ended.code == 0, ended.output
    return millrace.root / "hurt"


@pytest.fixture
def run(millrace: Millrace, finished: Path) -> Path:
    """A copy of it, to be damaged and resumed as `hurt`."""
    return Path(shutil.copytree(finished, millrace.root / "hurt"))


@pytest.mark.extended
def test_a_damaged_part_costs_its_own_rollouts_and_nothing_else(millrace: Millrace, run: Path) -> None:
    lost = next_part(run)
    flip_a_bit(run / layout.trajectories(0) / lost.file)
    checked = millrace.run("fsck", str(run))
    assert checked.code == 1
    assert lost.file in checked.output.replace("\n", "")
    ended = millrace.run(*millrace.campaign("hurt", "--resume", **MORE))
    assert ended.code == 0, ended.output
    summary = millrace.summary("hurt")
    assert_balanced(summary)
    assert summary["ledger"]["dropped"]["corrupt"] == {"rollouts": lost.rows, "tokens": lost.tokens}
    assert summary["ledger"]["trained"]["rollouts"] == 9 * 16 * 8
    log = (run / "logs" / "train-0.log").read_text()
    assert "Traceback" not in log


@pytest.mark.extended
def test_a_damaged_commit_record_stops_the_run_with_its_file_and_number(millrace: Millrace, run: Path) -> None:
    damaged = next_part(run)
    path = f"{layout.trajectories(0)}/{layout.record(damaged.seq)}"
    flip_a_bit(run / path)
    ended = millrace.run(*millrace.campaign("hurt", "--resume", **MORE))
    assert ended.code == 2, ended.output
    assert path in ended.output
    assert "Traceback" not in ended.output


@pytest.mark.extended
def test_a_ledger_that_does_not_balance_stops_the_run_and_names_the_rows(millrace: Millrace, run: Path) -> None:
    trainer = CheckpointWriter(open_store(str(run)))
    assert trainer.latest is not None
    state: dict[str, Any] = json.loads(json.dumps(trainer.latest.state))
    for amount in (state["account"]["trained"], state["account"]["by_generator"]["0"]):
        amount["rollouts"] -= 1
    trainer.adopt(trainer.latest, state)
    ended = millrace.run(*millrace.campaign("hurt", "--resume", **MORE))
    assert ended.code == 1, ended.output
    taken = 6 * 16 * 8
    assert f"streams/trajectories/0, rows 0 to {taken - 1}: the trainer's cursor passed {taken} " in ended.output
    assert f"but its account has {taken - 1} " in ended.output
    assert "Traceback" not in ended.output


@pytest.mark.extended
def test_a_trainer_goes_back_to_the_checkpoint_before_a_damaged_one_and_ends_in_the_same_weights(
    millrace: Millrace,
) -> None:
    sync = {"pipeline.mode": "sync"}
    for run_id, settings in (("calm", MORE), ("damaged", {})):
        ended = millrace.run(*millrace.campaign(run_id, **sync, **settings))
        assert ended.code == 0, ended.output
    calm, run = millrace.root / "calm", millrace.root / "damaged"
    store = open_store(str(run))
    latest = read_latest(store)
    assert latest is not None
    flip_a_bit(run / latest.files["model.safetensors"].path)
    ended = millrace.run(*millrace.campaign("damaged", "--resume", **sync, **MORE))
    assert ended.code == 0, ended.output
    assert_balanced(millrace.summary("damaged"))
    weights = []
    for url in (calm, run):
        checkpoint = read_latest(open_store(str(url)))
        assert checkpoint is not None
        weights.append(load_file(open_store(str(url)), checkpoint.files["model.safetensors"]))
    assert weights[0] == weights[1]
    assert millrace.summary("damaged")["ledger"]["dropped"]["rolled_back"]["rollouts"] > 0
