"""`millrace mirror --wandb`, with the real package: what stands in an offline run, and whom it calls."""

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from support.pages.mirrored import (
    CONFIG,
    DEADLINE,
    Trained,
    listening,
    run_mirror,
    start_mirror,
    wait_until,
    wandb_records,
    wandb_rows,
)

from dashboard.integrations.sinks.wandb import WeightsAndBiases
from millrace.errors import InputError
from storage.stores.factory import open_store


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return Trained(open_store(str(tmp_path / "runs" / "mine")))


def _row(version: int, *, incarnation: int = 0, reward: float | None = None) -> dict[str, Any]:
    return {
        "policy_version": version,
        "incarnation": incarnation,
        "unix_seconds": 100.0 + version,
        "train/reward_mean": version / 8 if reward is None else reward,
        "train/loss": -1.0,
    }


@pytest.mark.extended
def test_an_offline_run_of_wandb_holds_every_point_once_over_several_starts(trained: Trained, tmp_path: Path) -> None:
    trained.step(1, 2, 3)
    out = run_mirror(trained, "--wandb", "project", cwd=tmp_path)
    assert "mine: 3 new points ─► W&B, project project, offline, " in out
    assert "0 new points" in run_mirror(trained, "--wandb", "project", cwd=tmp_path)
    # A restarted trainer's; W&B takes nothing back.
    trained.step(3, incarnation=1, reward=9.0)
    trained.evaluate(3, 0.5)
    run_mirror(trained, "--wandb", "project", cwd=tmp_path)
    assert wandb_rows(tmp_path) == [
        (0, _row(1)),
        (1, _row(2)),
        (2, _row(3)),
        (3, _row(3, incarnation=1, reward=9.0)),
        (4, {"policy_version": 3, "unix_seconds": 50.0, "evaluation/accuracy": 0.5}),
    ]
    assert len(list(tmp_path.glob("wandb/offline-run-*-mine"))) == 2


@pytest.mark.extended
def test_what_is_remembered_outlives_a_mirror_that_is_killed(trained: Trained, tmp_path: Path) -> None:
    trained.step(*range(1, 30))
    process = start_mirror(trained, "--wandb", "project", "--follow", cwd=tmp_path)
    memory = tmp_path / "wandb" / "millrace-project-mine.json"
    wait_until(lambda: memory.exists() and json.loads(memory.read_text())["rows"] == 29)
    process.kill()
    process.communicate(timeout=DEADLINE)
    # The witness: it was at it, and not at its end.
    assert process.returncode == -signal.SIGKILL
    trained.step(30)
    run_mirror(trained, "--wandb", "project", cwd=tmp_path)
    assert [row["policy_version"] for _, row in wandb_rows(tmp_path)] == list(range(1, 31))


@pytest.mark.slow
def test_wandb_writes_where_its_own_variable_says_and_knows_the_config(trained: Trained, tmp_path: Path) -> None:
    trained.step(1)
    (tmp_path / "elsewhere").mkdir()
    run_mirror(trained, "--wandb", "project", cwd=tmp_path, WANDB_DIR=str(tmp_path / "elsewhere"))
    assert not (tmp_path / "wandb").exists()
    (file,) = (tmp_path / "elsewhere").glob("wandb/offline-run-*/run-mine.wandb")
    (run,) = (record.run for record in wandb_records(file) if record.WhichOneof("record_type") == "run")
    assert (run.run_id, run.project) == ("mine", "project")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config.items() >= CONFIG.items()


@pytest.mark.parametrize("project", ["a/b", "", "ä", "x" * 129])
def test_a_name_that_wandb_does_not_allow_is_refused(project: str) -> None:
    with pytest.raises(InputError):
        WeightsAndBiases(project, "mine")


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "calls"), [(None, False), ("online", True)])
def test_wandb_calls_nobody_unless_the_person_asks_for_it(
    trained: Trained, tmp_path: Path, mode: str | None, calls: bool
) -> None:
    trained.step(1)
    called = threading.Event()
    with listening(called) as address:
        environment = {
            "WANDB_BASE_URL": address, "HTTP_PROXY": address, "HTTPS_PROXY": address, "WANDB_API_KEY": "0" * 40,
            **({} if mode is None else {"WANDB_MODE": mode}),
        }  # fmt: skip
        process = start_mirror(trained, "--wandb", "project", cwd=tmp_path, **environment)
        if calls:
            # The witness: who calls, calls here.
            wait_until(called.is_set)
            process.kill()
        process.communicate(timeout=DEADLINE)
    assert called.is_set() == calls
    if not calls:
        assert [step for step, _ in wandb_rows(tmp_path)] == [0]
