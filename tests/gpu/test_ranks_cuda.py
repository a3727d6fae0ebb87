"""Trainer ranks over NCCL, each on its own GPU: they train as one process on a CPU does."""

import pytest
import torch
from support.training.sharded_trainers import LAYOUTS, Layout, Report, launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA devices"),
]

CASES = ("llama aipo float64", "qwen3 gspo float64", "qwen3 updates float64")
"""In double precision the order of sums makes no visible difference."""
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return launch(2, tmp_path_factory.mktemp("ranks") / "report.json", "cuda")


@pytest.mark.parametrize("layout", LAYOUTS[2])
@pytest.mark.parametrize("case", CASES)
def test_two_gpus_train_to_the_losses_and_weights_of_one_cpu(report: Report, case: str, layout: Layout) -> None:
    apart = report[f"{case} {layout}"]
    assert apart["start"] == 0.0
    for what in ("gradient", "grad_norm", "loss", "weights", "next_logprobs"):
        assert apart[what] <= TOLERANCE, what
    assert apart["misplaced_blocks"] == []
