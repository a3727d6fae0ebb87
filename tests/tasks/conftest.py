"""A fake stage under its supervisor."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.campaigns.campaigns import REPOSITORY
from support.stages import fake_stage
from support.stages.supervised import Supervised

from millrace.forking.stages import StageForkServer
from tasks.stop import STOP, STOP_NOW


@pytest.fixture(scope="session")
def fork_server() -> Iterator[StageForkServer]:
    """A fork server that forks fake stages."""
    server = StageForkServer()
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        server.warm_up([fake_stage.__name__])
    yield server
    server.close()


@pytest.fixture(params=["command", "forked"])
def supervised(
    request: pytest.FixtureRequest, fork_server: StageForkServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Iterator[Supervised]:
    """Started in either way; both behave alike."""
    caplog.set_level(logging.INFO, logger="stage")
    yield Supervised(tmp_path, caplog, fork_server if request.param == "forked" else None)
    STOP.clear()
    STOP_NOW.clear()
