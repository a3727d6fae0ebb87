"""A policy goes from any number of ranks to any other through checkpoints, and nothing of it changes on the way."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.training.checkpoint_ranks import make_model
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import HuggingFaceStorageReader

from millrace.training.checkpoints.names import MODEL, OPTIMIZER, kind_of
from millrace.training.checkpoints.policy_state import load_weights
from millrace.training.checkpoints.reading import StoredFiles, StoredTensors
from storage.checkpoints import Checkpoint, read_latest, stored_checkpoints
from storage.stores.base import Store
from storage.stores.factory import open_store

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
PATH = f"{ROOT}:{ROOT}/tests:{ROOT}/tests/support/campaigns/base_install"


@dataclass(frozen=True)
class Handed:
    """Results of four processes, see `support.training.checkpoint_ranks`."""

    store: Store
    reports: list[dict[str, Any]]

    def checkpoint(self, version: int) -> Checkpoint:
        return stored_checkpoints(self.store)[version]


@pytest.fixture(scope="module")
def handed(tmp_path_factory: pytest.TempPathFactory) -> Handed:
    folder = tmp_path_factory.mktemp("ranks")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    subprocess.run(
        [*torchrun, "-m", "support.training.checkpoint_ranks", str(folder / "run"), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH},
        check=True,
    )
    reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
    return Handed(open_store(str(folder / "run")), reports)


@pytest.mark.parametrize("name", ["4 to 2", "2 to 1", "1 to 2 x 2", "2 x 2 to 4"])
def test_another_layout_restores_weights_and_moments_bit_for_bit(handed: Handed, name: str) -> None:
    assert handed.reports[0]["apart"][name] == 0.0


def test_the_next_step_is_the_same_on_fewer_ranks(handed: Handed) -> None:
    assert handed.reports[0]["apart"]["the next step of 1 rank and of 2"] <= 1e-6


@pytest.mark.parametrize(("version", "ranks"), [(2, 4), (3, 2), (4, 1), (5, 4)])
def test_every_rank_writes_a_share_and_every_element_is_written_once(handed: Handed, version: int, ranks: int) -> None:
    files = StoredFiles(handed.store, handed.checkpoint(version))
    for kind, slots in ((MODEL, 1), (OPTIMIZER, 2)):
        names = [name for name in files if kind_of(name) == kind]
        assert len(names) == ranks
        loaded = [safetensors.torch.load(bytes(files[name])) for name in names]
        elements = [sum(tensor.numel() for tensor in tensors.values()) for tensors in loaded]
        whole = sum(shape.numel() for shape in StoredTensors(files, kind).shapes.values())
        assert sum(elements) == whole
        parameters = sum(parameter.numel() for parameter in make_model(0).parameters())
        steps = len(list(make_model(0).parameters())) if kind == OPTIMIZER else 0
        assert whole == slots * parameters + steps
        assert max(elements) < 1.5 * whole / ranks, "no rank writes for the others"


def test_who_is_alone_reads_the_weights_of_many_ranks(handed: Handed) -> None:
    weights = load_weights(handed.store, handed.checkpoint(5), {})
    model = make_model(seed=3)
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: parameter.shape for name, parameter in model.named_parameters()
    }
    previous = load_weights(handed.store, handed.checkpoint(4), {})
    assert not torch.equal(weights["lm_head.weight"], previous["lm_head.weight"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_s_own_reader_finds_the_same_weights(handed: Handed) -> None:
    checkpoint = handed.checkpoint(5)
    folder = handed.store.local_path(next(iter(checkpoint.files.values())).path)
    assert folder is not None
    weights = load_weights(handed.store, checkpoint, {})
    found = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    torch_checkpoint.load(found, storage_reader=HuggingFaceStorageReader(str(folder.parent)))
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def test_a_rank_that_can_not_write_is_named_and_the_last_checkpoint_stays(handed: Handed) -> None:
    failures = [report["failure"] for report in handed.reports]
    assert failures[0].startswith("rank 2 could not write its files of the checkpoint of version 6: ")
    assert "fault error_before" in failures[2]
    assert failures[1] == failures[3] == ""
    latest = read_latest(handed.store)
    assert latest is not None
    assert latest.step == 5
