"""A run to replay, see `support.replay.trained_run`."""

import shutil
from pathlib import Path

import pytest
from support.replay.trained_run import TrainedRun


@pytest.fixture
def trained(unchanged: TrainedRun, tmp_path: Path) -> TrainedRun:
    """A copy of the run that a test may change."""
    shutil.copytree(unchanged.folder, tmp_path / "run")
    return TrainedRun(tmp_path / "run", unchanged.steps)
