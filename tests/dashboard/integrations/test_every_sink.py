"""What each sink of `millrace mirror` holds: every figure under one name, at its policy version, over restarts."""

import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.pages.mirrored import Trained, events, listening, run_mirror, wandb_rows

from storage.stores.factory import open_store

pytestmark = pytest.mark.slow

Point = tuple[str, int, float]
"""Name, policy version, value."""
# In a process of its own: importing it takes seconds.
_MLFLOW = """
from mlflow.tracking import MlflowClient
client = MlflowClient("sqlite:///mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
assert run.data.params["training.max_steps"] == "10"
for name in run.data.metrics:
    for metric in client.get_metric_history(run.info.run_id, name):
        print(name, metric.step, metric.value)
"""


def _mlflow(folder: Path) -> Iterator[Point]:
    done = subprocess.run([sys.executable, "-c", _MLFLOW], cwd=folder, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        name, step, value = line.split()
        yield name, int(step), float(value)


def _tensorboard(folder: Path) -> Iterator[Point]:
    for event in events(folder / "project" / "mine"):
        for value in event.summary.value:
            if not value.metadata.plugin_data.plugin_name:
                yield value.tag, event.step, value.simple_value


def _wandb(folder: Path) -> Iterator[Point]:
    for _, row in wandb_rows(folder):
        for name, value in row.items():
            yield name, row["policy_version"], value


def _trackio(folder: Path) -> Iterator[Point]:
    with closing(sqlite3.connect(folder / "trackio" / "project.db")) as database:
        for step, metrics in database.execute("select step, metrics from metrics"):
            for name, value in json.loads(metrics).items():
                yield name, step, value


READ: dict[str, Callable[[Path], Iterator[Point]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}


@pytest.mark.parametrize("sink", READ)
def test_it_holds_each_figure_once_under_its_name_over_starts_and_calls_nobody(sink: str, tmp_path: Path) -> None:
    trained = Trained(open_store(str(tmp_path / "runs" / "mine")))
    trained.evaluate(0, 0.25)
    trained.step(1, 2)
    called = threading.Event()
    with listening(called) as proxy:
        environment = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HTTP_PROXY": proxy, "HTTPS_PROXY": proxy}
        for new_points in (3, 1, 0):
            out = run_mirror(trained, f"--{sink}", "project", cwd=tmp_path, **environment)
            assert out.startswith(f"mine: {new_points} new points ─► ")
            assert len(out.splitlines()) == 1
            if new_points == 3:
                trained.step(3)
    assert not called.is_set()
    held = sorted(point for point in READ[sink](tmp_path) if point[0].startswith(("train/", "evaluation/")))
    rewards = [("train/reward_mean", version, version / 8) for version in (1, 2, 3)]
    losses = [("train/loss", version, -1.0) for version in (1, 2, 3)]
    assert held == [("evaluation/accuracy", 0, 0.25), *losses, *rewards]
