"""Fixtures that tests of several packages share: S3 servers, and a disk that fills up."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import pytest
from support.campaigns.campaigns import SESSION_FOLDER
from support.stores.ceph import CephServer, CephUnavailable, running_ceph
from support.stores.memory import remove_stores
from support.stores.s3_server import S3Server
from support.stores.small_disk import NotMounted, small_disk

# A busy machine is no reason to fail.
hypothesis.settings.register_profile("millrace", deadline=None)
hypothesis.settings.load_profile("millrace")


def pytest_configure(config: pytest.Config) -> None:
    """Makes a folder for what is made once per session. Workers of pytest-xdist inherit it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    folder = os.environ[SESSION_FOLDER] = tempfile.mkdtemp(prefix="millrace-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture(scope="session", autouse=True)
def _no_stores_left_in_memory() -> Iterator[None]:
    yield
    remove_stores()


@pytest.fixture(scope="session")
def moto_s3() -> Iterator[S3Server]:
    """An imitation of S3, up at once; it believes every key."""
    # Late: only the tests that use it need moto, which takes a second to import.
    from support.stores.moto_server import running_moto

    with running_moto() as server:
        yield server


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephServer]:
    """A real S3 server. Tests that use it are marked `ceph`."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(running_ceph(tmp_path_factory.mktemp("ceph")))
        except CephUnavailable as error:
            pytest.skip(str(error))
        yield server


@pytest.fixture
def make_small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """`make(megabytes)`: the folder of a disk with that much room, empty. Skips the test where nobody may mount."""
    with ExitStack() as stack:

        def make(megabytes: int) -> Path:
            try:
                return stack.enter_context(small_disk(tmp_path / "small-disk", megabytes))
            except NotMounted as error:
                pytest.skip(f"a small disk can't be mounted here: {error}")

        yield make
