"""The dashboard without a browser: pages at their addresses, refreshes, and answers to strangers."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dash import no_update
from flask.testing import FlaskClient
from support.pages.components import plain, texts, within
from support.pages.sites import LOCAL, TOKEN, open_client, open_site, store_run
from support.stored_run.metrics import metric_rows
from support.stored_run.run import Shape
from support.streams.rows import part_files

from dashboard.pages import address
from dashboard.pages.draw import CHART, TEXT
from dashboard.pages.site import TRAJECTORIES, VIEWS
from dashboard.read.run_reader import RunReader
from dashboard.read.runs import Runs
from dashboard.server.app import make_app
from dashboard.views.blocks import MINUTES, Chart
from dashboard.views.home import HOME
from storage import layout
from storage.progress import read_status, write_progress
from storage.schema import METRIC
from storage.streams.stream import StreamWriter

NAMES = [view.name for view in VIEWS]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def blocks_on(body: Any, kind: str) -> list[str]:
    ids = [part["props"].get("id") for part in within(body)]
    return [name["block"] for name in ids if isinstance(name, dict) and name["type"] == kind]


def test_a_run_that_is_being_created_is_listed_and_its_page_keeps_looking(root: Path) -> None:
    (root / "coming").mkdir(parents=True)
    store_run(root, "there")
    pages = open_site(root)
    overview = texts(plain(pages.show("/", "").body))
    assert "coming no run.json yet" in overview
    assert "3 of 6" in overview
    shown = pages.show("/run/coming", "")
    assert "keeps looking" in texts(plain(shown.body))
    assert "coming" in texts(plain(shown.frame))
    assert not pages.refresh("/run/coming", "", shown.drawn_from, [], []).again
    store_run(root, "coming")
    assert pages.refresh("/run/coming", "", shown.drawn_from, [], []).again
    assert blocks_on(plain(pages.show("/run/coming", "").body), CHART)


@pytest.mark.parametrize("view", VIEWS, ids=NAMES)
def test_every_block_of_a_view_is_on_its_page_for_one_run_and_for_several(root: Path, view: Any) -> None:
    store_run(root, "one", shape=Shape(steps=6, sources=("math", "words"))).decide()
    store_run(root, "two", steps=2)
    for path, search in ((f"/run/one/{view.name}", ""), (f"/compare/{view.name}", "?runs=one,two")):
        body = plain(open_site(root).show(path, search).body)
        charts = [block.id for block in view.blocks if isinstance(block, Chart)]
        # Those without data are folded with the rest.
        assert sorted(blocks_on(body, CHART)) == sorted(charts)
        assert sorted(blocks_on(body, TEXT)) == sorted(block.id for block in view.blocks if block.id not in charts)


def test_a_refresh_brings_every_block_if_anything_is_new_else_nothing(root: Path) -> None:
    run = store_run(root, "live")
    pages = open_site(root)
    shown = pages.show("/run/live/staleness", "")
    charts, tables = blocks_on(plain(shown.body), CHART), blocks_on(plain(shown.body), TEXT)
    same = pages.refresh("/run/live/staleness", "", shown.drawn_from, charts, tables)
    assert [*same.figures, *same.texts] == [no_update] * (len(charts) + len(tables))
    assert not same.drawn_from
    of_ledger = {"figures": pages.show("/run/live/ledger", "").drawn_from["figures"]}
    after_late_update = pages.refresh("/run/live/staleness", "", {**shown.drawn_from, **of_ledger}, charts, tables)
    assert no_update not in [*after_late_update.figures, *after_late_update.texts]
    run.append(1)
    # Another site, for a reader may answer with its last look for some tenths of a second.
    fresh = open_site(root).refresh("/run/live/staleness", "", shown.drawn_from, charts, tables)
    assert no_update not in [*fresh.figures, *fresh.texts]
    assert fresh.drawn_from["seen"] != shown.drawn_from["seen"]
    assert "step 4 of 6" in texts(plain(fresh.frame))


def test_a_damaged_part_is_named_above_the_page_and_the_rest_is_drawn(root: Path) -> None:
    damaged = root / "hurt" / part_files(store_run(root, "hurt").store, layout.metrics("train", 0))[0]
    damaged.write_bytes(damaged.read_bytes()[:-8] + b"\xff" * 8)
    shown = open_site(root).show("/run/hurt/learning", "")
    assert damaged.name in texts(plain(shown.frame))
    charts = [block.id for block in VIEWS[2].blocks if isinstance(block, Chart)]
    assert sorted(blocks_on(plain(shown.body), CHART)) == sorted(charts)


def test_a_page_that_fails_shows_the_reason_and_draws_itself_once_it_can(root: Path) -> None:
    sound = store_run(root, "one")
    store_run(root, "two")
    record = read_status(sound.store, "generate", 0)
    write_progress(
        sound.store, "generate", 0, {name: value for name, value in record.items() if name != "groups_in_flight"}
    )
    shown = open_site(root).show("/run/one", "")
    assert "groups_in_flight" in texts(plain(shown.body))
    assert "\n" not in texts(plain(shown.body))
    assert blocks_on(plain(open_site(root).show("/run/two", "").body), CHART)
    assert (
        open_client(root).get("/metrics", headers=LOCAL).get_data(as_text=True).count('ledger_balanced{run="two"} 1.0')
        == 1
    )
    write_progress(sound.store, "generate", 0, record)
    assert open_site(root).refresh("/run/one", "", shown.drawn_from, [], []).again


def test_a_run_that_vanishes_leaves_its_page_as_it_was_and_a_sentence(root: Path) -> None:
    store_run(root, "gone")
    pages = open_site(root)
    shown = pages.show("/run/gone/ledger", "")
    (root / "gone" / "run.json").unlink()
    fresh = open_site(root).refresh("/run/gone/ledger", "", shown.drawn_from, [], ["ledger-balance"])
    assert fresh.texts == [no_update]
    assert not fresh.again
    assert "run.json" in texts(plain(fresh.frame))


def test_the_address_holds_how_charts_are_shown_and_every_view_keeps_it(root: Path) -> None:
    store_run(root, "one", steps=6)
    shown = open_site(root).show("/run/one/learning", "?smooth=25&x=time")
    nav = next(part for part in within(plain(shown.frame)) if part["type"] == "Nav")
    assert str(nav).count("smooth=25&x=time") == len([HOME, *VIEWS, TRAJECTORIES])
    plainly = open_site(root).show("/run/one/learning", "")
    assert str(plain(plainly.body)).count(MINUTES) == 0 < str(plain(shown.body)).count(MINUTES)


@pytest.mark.parametrize(
    ("path", "search"),
    [
        ("/run/nobody", ""),
        ("/run/one/nothing", ""),
        ("/run/one/staleness/more", ""),
        ("/run/../../etc/passwd", ""),
        ("/run/..%2f..%2fetc%2fpasswd", ""),
        ("/run/<script>alert(1)</script>", ""),
        ("/elsewhere", ""),
        ("/compare", ""),
        ("/compare", "?runs=" + ",".join(f"r{i}" for i in range(9))),
        ("/compare", "?runs=one,nobody"),
        ("/run/" + "x" * 10_000, ""),
        ("/run/one/learning", "?smooth=7"),
        ("/run/one/learning", "?x=colour"),
        ("/run/one/evaluation", "?before=first"),
        ("/run/one/evaluation", "?after=-1"),
        ("/run/one/evaluation", "?after=" + "9" * 1_000),
    ],
)
def test_an_address_that_leads_nowhere_is_answered_by_one_short_sentence(path: str, search: str) -> None:
    answer = address.parse(path, search, ["one"], NAMES)
    assert isinstance(answer, address.NotFound)
    assert 0 < len(answer.sentence) < 200


def test_addresses_of_pages_are_answered_and_others_with_404(root: Path) -> None:
    store_run(root, "one")
    page = open_client(root)
    for path in ("/", "/run/one", "/run/one/flow", "/run/one/trajectories?group=1", "/compare?runs=one"):
        assert page.get(path, headers=LOCAL).status_code == 200, path
    for path in (
        "/run/nobody",
        "/run/..%2f..%2fetc%2fpasswd",
        "/run/%2e%2e/%2e%2e/etc/passwd",
        "/assets/..%2fapp.py",
        "/assets/%2e%2e/app.py",
        "/_dash-component-suites/dash/..%2f..%2fsecret.js",
        "/_dash-component-suites/os/path.py",
    ):
        response = page.get(path, headers=LOCAL)
        assert response.status_code == 404, path
        assert "import" not in response.text


def show_request(**changed: Any) -> dict[str, Any]:
    """The request that Dash's script sends when a page is opened."""
    outputs = [("frame", "children"), ("page", "children"), ("shown", "data")]
    return {
        "output": "..frame.children...page.children...shown.data..",
        "outputs": [{"id": name, "property": of} for name, of in outputs],
        "inputs": [
            {"id": "address", "property": "pathname", "value": "/run/one"},
            {"id": "address", "property": "search", "value": ""},
            {"id": "again", "property": "data"},
        ],
        "changedPropIds": ["address.pathname"],
        "state": [{"id": "shown", "property": "data"}],
        **changed,
    }


def test_a_callback_shows_a_page(root: Path) -> None:
    store_run(root, "one")
    page = open_client(root)
    answer = page.post("/_dash-update-component", json=show_request(), headers=LOCAL)
    assert answer.status_code == 200
    assert answer.json["response"]["shown"]["data"]["path"] == "/run/one"


def test_a_malformed_request_is_refused(root: Path) -> None:
    store_run(root, "one")
    page = open_client(root)
    for body in (
        [],
        3,
        {},
        show_request(output=1),
        show_request(output="frame.children"),
        show_request(outputs=3),
        show_request(inputs=[1]),
        show_request(inputs=[{"id": "address", "property": "pathname", "value": 5}]),
        show_request(inputs=None),
        show_request(state=[{"id": "shown", "property": "data", "value": 7}]),
        show_request(changedPropIds=[None]),
    ):
        assert page.post("/_dash-update-component", json=body, headers=LOCAL).status_code == 400, body
    nested = page.post("/_dash-update-component", data=b"[" * 50_000, headers=LOCAL, content_type="application/json")
    assert nested.status_code == 400


def senseless_requests(page: FlaskClient) -> Iterator[dict[str, Any]]:
    """Requests for every callback of the app, with values, and numbers of them, that no page sends."""
    for entry in page.get("/_dash-dependencies", headers=LOCAL).json:
        yield show_request(output=entry["output"])
        yield show_request(output=entry["output"], inputs=[])
        yield show_request(output=entry["output"], outputs=[], state=[])
        shown = {"id": "shown", "property": "data", "value": {"path": "/run/one", "page": "run", "runs": 3}}
        yield show_request(output=entry["output"], state=[shown] * 4)


def test_a_well_formed_request_without_sense_is_refused(root: Path) -> None:
    store_run(root, "one")
    page = open_client(root)
    bodies = senseless_requests(page)
    answers = {page.post("/_dash-update-component", json=body, headers=LOCAL).status_code for body in bodies}
    assert 400 in answers
    assert answers <= {200, 204, 400}


def test_the_token_guards_the_page_its_callbacks_its_scripts_and_the_metrics(root: Path) -> None:
    store_run(root, "one")
    page = open_client(root, host="0.0.0.0", token=TOKEN)
    paths = ("/", "/_dash-layout", "/_dash-dependencies", "/assets/style.css", "/metrics", "/run/one")
    for path in paths:
        assert page.get(path).status_code == 401, path
        assert page.get(path, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200, path
    assert page.post("/_dash-update-component", json={}).status_code == 401


def test_the_app_is_no_development_server(root: Path) -> None:
    page = open_client(root)
    config = page.get("/", headers=LOCAL).text
    assert '"ui":false' in config
    assert '"validate_callbacks":false' in config
    assert page.get("/_mcp", headers=LOCAL).status_code == 404
    assert page.get("/console", headers=LOCAL).status_code == 404


@pytest.mark.parametrize(("ratio", "said"), [(1.02, False), (0.9, True)])
def test_the_top_of_a_page_says_that_the_length_is_biased(root: Path, ratio: float, said: bool) -> None:
    run = store_run(root, "biased")
    metrics = StreamWriter(run.store, layout.metrics("train", 0), METRIC, "train-0")
    rows = metric_rows({"length_ratio": ratio}, incarnation=0, t=run.t_now, policy_version=run.policy_version)
    metrics.write(pa.concat_tables([rows] * 20), tokens=0)
    assert (
        f"trained ÷ taken length {ratio:.3f}" in texts(plain(open_site(root).show("/run/biased", "").frame))
    ) == said


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
    return make_app(runs, host="127.0.0.1", token=token).server.test_client()


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
