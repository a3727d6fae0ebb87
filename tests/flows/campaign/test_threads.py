"""Cores of a host, divided among trainer and generators when an attempt starts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from configs.schema import RunConfig
from flows.campaign.threads import FEWEST_PARAMETERS, with_threads
from millrace.runs.record import create_run
from storage.progress import write_progress
from storage.stores.local import LocalStore


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A folder with as many parameters as gain by several threads."""
    return _folder(tmp_path / "large", FEWEST_PARAMETERS)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "run"))


def _folder(folder: Path, num_parameters: int) -> Path:
    folder.mkdir()
    save_file({"weight": torch.zeros(num_parameters, dtype=torch.bfloat16)}, folder / "model.safetensors")
    return folder


def _config(path: Path | None, **sections: dict[str, Any]) -> RunConfig:
    training = {"max_steps": 1, **sections.pop("training", {})}
    return RunConfig.model_validate({"model": {"path": path and str(path)}, "training": training, **sections})


def _chosen(config: RunConfig, store: LocalStore, cores: int) -> tuple[int | None, int | None]:
    chosen = with_threads(config, store, cores)
    return chosen.training.threads, chosen.generation.threads


@pytest.mark.parametrize(
    ("cores", "sections", "train", "generate"),
    [
        (1, {}, 1, 1),
        (2, {}, 1, 1),
        (16, {}, 8, 8),
        (16, {"generation": {"replicas": 4}}, 8, 2),
        (16, {"training": {"parallel": {"data": 2}}}, 4, 8),
        (16, {"training": {"threads": 12}}, 12, 4),
        (16, {"generation": {"threads": 3, "replicas": 2}}, 10, 3),
        (2, {"training": {"threads": 5}}, 5, 1),
        (16, {"training": {"device": "cuda"}}, 1, 1),
        (16, {"pipeline": {"mode": "sync"}, "generation": {"replicas": 2}}, 16, 8),
    ],
)
def test_a_new_run_halves_the_cores_that_are_not_given(
    store: LocalStore, large: Path, cores: int, sections: dict[str, Any], train: int, generate: int
) -> None:
    assert _chosen(_config(large, **sections), store, cores) == (train, generate)


def test_a_small_model_has_one_thread_each(store: LocalStore, tmp_path: Path) -> None:
    assert _chosen(_config(None), store, 16) == (1, 1)
    small = _folder(tmp_path / "small", FEWEST_PARAMETERS - 1)
    assert _chosen(_config(small), store, 16) == (1, 1)


@pytest.mark.parametrize(
    ("busy", "train", "generate"), [((60.0, 20.0), 12, 4), ((0.0, 20.0), 8, 8), ((90.0, 1.0), 15, 1)]
)
def test_a_resumed_run_divides_them_by_the_work_of_its_last_attempt(
    store: LocalStore, large: Path, busy: tuple[float, float], train: int, generate: int
) -> None:
    first = with_threads(_config(large), store, 16)
    create_run(store, "run", first.model_dump(mode="json"))
    for stage, seconds in zip(("train", "generate"), busy, strict=True):
        write_progress(store, stage, 0, {"seconds": {"busy": seconds, "idle": 99.0}})
    assert _chosen(_config(large), store, 16) == (train, generate)
