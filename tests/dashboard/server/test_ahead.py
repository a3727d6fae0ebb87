"""The runs of a page are read while the browser loads its scripts, and only by who may read them."""

import threading
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from support.stored_run.run import Shape, StoredRun

from dashboard.read.run_reader import RunReader
from dashboard.read.runs import Runs
from dashboard.server.app import make_app
from dashboard.views.registry import VIEWS
from storage.stores.local import LocalStore

LOCAL = {"Host": "127.0.0.1:8050"}
TOKEN = "a-token-of-some-length"


class NotedRuns(Runs):
    """Notes of which run a reader was asked for."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.asked: list[str] = []
        self.was_asked = threading.Event()

    def reader(self, run_id: str) -> RunReader:
        self.asked.append(run_id)
        self.was_asked.set()
        return super().reader(run_id)


@pytest.fixture
def runs(tmp_path: Path) -> NotedRuns:
    StoredRun(LocalStore(tmp_path / "one", fsync=False), "one", Shape(steps=3)).append(2)
    return NotedRuns(str(tmp_path))


def client(runs: Runs, token: str | None = None) -> FlaskClient:
    return make_app(runs, VIEWS, host="127.0.0.1", token=token).server.test_client()


def test_a_page_begins_to_read_its_run_before_it_asks(runs: NotedRuns) -> None:
    assert client(runs).get("/run/one/flow", headers=LOCAL).status_code == 200
    assert runs.was_asked.wait(30)
    assert runs.asked == ["one"]


@pytest.mark.parametrize(("path", "token"), [("/", None), ("/run/nobody", None), ("/run/one", TOKEN)])
def test_a_page_without_a_run_or_a_reader_without_the_token_begins_nothing(
    runs: NotedRuns, path: str, token: str | None
) -> None:
    assert client(runs, token).get(path, headers=LOCAL).status_code != 500
    assert not runs.was_asked.wait(0.3)
