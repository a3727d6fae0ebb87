"""Stored runs below a root folder, the dashboard over them without a browser, and a clock that stands still."""

from pathlib import Path

from flask.testing import FlaskClient
from support.stored_run.run import Shape, StoredRun

from dashboard.pages.site import Site
from dashboard.read.runs import Runs
from dashboard.server.app import make_app
from storage.stores.local import LocalStore

LOCAL = {"Host": "127.0.0.1:8050"}
TOKEN = "a-token-of-some-length"
_SHAPE = Shape(steps=6)


def store_run(root: Path, run_id: str, steps: int = 3, shape: Shape = _SHAPE) -> StoredRun:
    """A run of `steps` steps in the folder `root`."""
    run = StoredRun(LocalStore(root / run_id, fsync=False), run_id, shape)
    run.append(steps)
    return run


def open_site(root: Path) -> Site:
    return Site(Runs(str(root)))


def open_client(root: Path, *, host: str = "127.0.0.1", token: str | None = None) -> FlaskClient:
    return make_app(Runs(str(root)), host=host, token=token).server.test_client()


class HandClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
