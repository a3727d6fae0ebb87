"""Damaged stored runs are continued: damaged parts are set aside, named and counted, never trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.campaigns.campaigns import Millrace, final_weights
from support.stores.faulty_store import flip_a_bit

from storage import layout
from storage.checkpoints import CheckpointWriter, read_latest
from storage.stores.factory import open_store
from storage.streams.log import LogReader
from storage.streams.record import Record

pytestmark = [pytest.mark.campaign, pytest.mark.extended]

MORE = {"training.max_steps": 9}


def next_part(run: Path) -> Record:
    """The first part of trajectories that the trainer has not touched."""
    store = open_store(str(run))
    checkpoint = read_latest(store)
    assert checkpoint is not None
    stream: dict[str, Any] = checkpoint.state["intake"][0]
    touched = [entry["part"] for entry in stream["taken_of_parts"]]
    number = max(touched, default=stream["trajectories"]["part"] - 1) + 1
    records = iter(LogReader(store, layout.trajectories(0)).next, None)
    return next(record for record in records if record.kind == "data" and record.part == number)


@pytest.fixture(scope="module")
def finished(module_millrace: Millrace) -> Path:
    """A campaign that came to its end, to be copied."""
    module_millrace.finish("hurt")
    return module_millrace.root / "hurt"


@pytest.fixture
def run(millrace: Millrace, finished: Path) -> Path:
    """A copy of it, to be damaged and resumed as `hurt`."""
    return Path(shutil.copytree(finished, millrace.root / "hurt"))


def test_a_damaged_part_costs_its_own_rollouts_and_nothing_else(millrace: Millrace, run: Path) -> None:
    lost = next_part(run)
    flip_a_bit(run / layout.trajectories(0) / lost.file)
    checked = millrace.run("fsck", str(run))
    assert checked.code == 1
    assert lost.file in checked.output.replace("\n", "")
    summary = millrace.finish("hurt", "--resume", **MORE)
    assert summary["ledger"]["dropped"]["corrupt"] == {"rollouts": lost.rows, "tokens": lost.tokens}
    assert summary["ledger"]["trained"]["rollouts"] == 9 * 16 * 8
    assert "Traceback" not in (run / "logs" / "train-0.log").read_text()


def test_a_damaged_commit_record_stops_the_run_with_its_file_and_number(millrace: Millrace, run: Path) -> None:
    damaged = next_part(run)
    path = f"{layout.trajectories(0)}/{layout.record(damaged.seq)}"
    flip_a_bit(run / path)
    ended = millrace.run(*millrace.campaign("hurt", "--resume", **MORE))
    ended.expect_refusal()
    assert path in ended.output


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


def test_a_trainer_goes_back_before_a_damaged_checkpoint_to_the_same_weights(millrace: Millrace) -> None:
    sync = {"pipeline.mode": "sync"}
    millrace.finish("calm", **sync, **MORE)
    millrace.finish("damaged", **sync)
    latest = read_latest(millrace.store("damaged"))
    assert latest is not None
    flip_a_bit(millrace.root / "damaged" / latest.files["model.safetensors"].path)
    summary = millrace.finish("damaged", "--resume", **sync, **MORE)
    assert final_weights(millrace.store("calm")) == final_weights(millrace.store("damaged"))
    assert summary["ledger"]["dropped"]["rolled_back"]["rollouts"] > 0
