"""The Prefect server and the root folders that whole campaigns are run with: fixtures, for the conftest of a folder."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.campaigns.campaigns import BASE_INSTALL, REPOSITORY, Millrace, healthy, wait_until

from flows.deployment.server import free_port


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment without the person's own Prefect, and without what only tests need."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {
        **mine,
        **BASE_INSTALL,
        "PREFECT_HOME": str(tmp_path_factory.mktemp("prefect")),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }


@pytest.fixture(scope="session")
def prefect_api(environment: dict[str, str]) -> Iterator[str]:
    """The API of a real Prefect server that all campaigns of the session share."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.deployment.server", str(port)],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.PIPE,
    )
    url = f"http://127.0.0.1:{port}/api"
    wait_until(lambda: healthy(url), "the Prefect server to be healthy")
    yield url
    process.terminate()
    process.wait(timeout=30)


@pytest.fixture
def millrace(tmp_path: Path, environment: dict[str, str], prefect_api: str) -> Iterator[Millrace]:
    command = Millrace(tmp_path / "runs", {**environment, "PREFECT_API_URL": prefect_api})
    yield command
    command.close()


@pytest.fixture(scope="module")
def module_millrace(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], prefect_api: str
) -> Iterator[Millrace]:
    """For campaigns that several tests of a module look at."""
    command = Millrace(tmp_path_factory.mktemp("runs"), {**environment, "PREFECT_API_URL": prefect_api})
    yield command
    command.close()


@pytest.fixture
def millrace_alone(tmp_path: Path, environment: dict[str, str]) -> Iterator[Millrace]:
    """The command without a Prefect server."""
    command = Millrace(tmp_path / "runs", environment)
    yield command
    command.close()
