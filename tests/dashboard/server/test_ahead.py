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


@pytest.mark.parametrize("path", ["/", "/run/nobody", "/assets/page.js"])
def test_what_is_no_page_of_a_run_begins_nothing(runs: NotedRuns, path: str) -> None:
    client(runs).get(path, headers=LOCAL)
    client(runs).head("/run/one", headers=LOCAL)
    assert not runs.was_asked.wait(0.3)


def test_who_has_no_token_begins_nothing(runs: NotedRuns) -> None:
    assert client(runs, TOKEN).get("/run/one", headers=LOCAL).status_code == 401
    assert not runs.was_asked.wait(0.3)


def test_a_page_that_is_not_drawn_yet_is_not_updated(runs: NotedRuns) -> None:
    page = client(runs)
    known = [one["output"] for one in page.get("/_dash-dependencies", headers=LOCAL).json]
    (output,) = (one for one in known if "again.data" in one)
    parts = [
        {"id": "frame", "property": "children"}, [], [], {"id": "shown", "property": "data"},
        {"id": "again", "property": "data"},
    ]  # fmt: skip
    question = {
        "output": output,
        "outputs": parts,
        "inputs": [{"id": "tick", "property": "n_intervals", "value": 1}],
        "state": [
            {"id": "address", "property": "pathname", "value": "/run/one"},
            {"id": "address", "property": "search", "value": ""},
            {"id": "shown", "property": "data", "value": None},
        ],
        "changedPropIds": ["tick.n_intervals"],
    }
    assert page.post("/_dash-update-component", json=question, headers=LOCAL).status_code == 204
