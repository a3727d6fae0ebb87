"""A stage that does as it is told, under its supervisor."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stages.supervised import Supervised

from tasks.stop import STOP


@pytest.fixture
def supervised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Supervised]:
    caplog.set_level(logging.INFO, logger="stage")
    yield Supervised(tmp_path, caplog)
    STOP.clear()
