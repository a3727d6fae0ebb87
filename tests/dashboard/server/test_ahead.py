"""The runs of a page are read while the browser loads its scripts, and only by who may read them."""

import threading
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from support.pages.sites import LOCAL, TOKEN, store_run

from dashboard.read.run_reader import RunReader
from dashboard.read.runs import Runs
from dashboard.server.app import make_app
from dashboard.views.registry import VIEWS


class NotedRuns(Runs):
    """Notes the runs for which a reader was requested."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.requested: list[str] = []
        self.was_requested = threading.Event()

    def reader(self, run_id: str) -> RunReader:
        self.requested.append(run_id)
        self.was_requested.set()
        return super().reader(run_id)


@pytest.fixture
def runs(tmp_path: Path) -> NotedRuns:
    store_run(tmp_path, "one")
    return NotedRuns(str(tmp_path))


def client(runs: Runs, token: str | None = None) -> FlaskClient:
    return make_app(runs, VIEWS, host="127.0.0.1", token=token).server.test_client()


def test_a_page_begins_to_read_its_run_before_it_asks(runs: NotedRuns) -> None:
    assert client(runs).get("/run/one/flow", headers=LOCAL).status_code == 200
    assert runs.was_requested.wait(30)
    assert runs.requested == ["one"]


@pytest.mark.parametrize(("path", "token"), [("/", None), ("/run/nobody", None), ("/run/one", TOKEN)])
def test_a_page_without_a_run_or_a_reader_without_the_token_begins_nothing(
    runs: NotedRuns, path: str, token: str | None
) -> None:
    assert client(runs, token).get(path, headers=LOCAL).status_code != 500
    assert not runs.was_requested.wait(0.3)
