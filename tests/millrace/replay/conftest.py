"""A run to replay: trained once a session, see `support.replay.trained_run`."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.replay.trained_run import TrainedRun, train_and_store
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def unchanged(
    tmp_path_factory: pytest.TempPathFactory,
    make_model: Callable[..., LlamaForCausalLM],
    tokenizer: PreTrainedTokenizerFast,
) -> TrainedRun:
    """The run, for tests that only read it."""
    start = tmp_path_factory.mktemp("start")
    make_model(0).save_pretrained(start)
    return train_and_store(tmp_path_factory.mktemp("trained") / "run", start, len(tokenizer))


@pytest.fixture
def trained(unchanged: TrainedRun, tmp_path: Path) -> TrainedRun:
    """A copy of the run that a test may change."""
    shutil.copytree(unchanged.folder, tmp_path / "run")
    return TrainedRun(tmp_path / "run", unchanged.steps)
