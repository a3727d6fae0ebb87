"""The dashboard without a browser: what stands at an address, what a refresh brings, what strangers are answered."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dash import no_update
from flask.testing import FlaskClient
from support.pages.components import plain, texts, within
from support.stored_run.metrics import metric_rows
from support.stored_run.run import Shape, StoredRun

from dashboard.pages import address
from dashboard.pages.draw import CHART, TEXT
from dashboard.pages.site import TRAJECTORIES, Site
from dashboard.read.runs import Runs
from dashboard.server.app import make_app
from dashboard.server.callbacks import is_callback
from dashboard.views.blocks import Chart
from dashboard.views.home import HOME, HOME_BY_TIME
from dashboard.views.per_run import MINUTES
from dashboard.views.registry import VIEWS
from storage import layout
from storage.schema import METRIC
from storage.stores.local import LocalStore
from storage.streams.log import LogReader
from storage.streams.stream import StreamWriter

SHAPE = Shape(steps=6)
NAMES = [view.name for view in VIEWS]
LOCAL = {"Host": "127.0.0.1:8050"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def stored(root: Path, run_id: str, steps: int = 3) -> StoredRun:
    run = StoredRun(LocalStore(root / run_id, fsync=False), run_id, SHAPE)
    run.append(steps)
    return run


def site(root: Path) -> Site:
    return Site(Runs(str(root)), VIEWS)


def client(root: Path, **guarded: Any) -> FlaskClient:
    app = make_app(Runs(str(root)), VIEWS, **{"host": "127.0.0.1", "token": None, **guarded})
    return app.server.test_client()


def blocks_on(body: Any, kind: str) -> list[str]:
    ids = [part["props"].get("id") for part in within(body)]
    return [found["block"] for found in ids if isinstance(found, dict) and found["type"] == kind]


def test_a_run_that_is_being_created_is_listed_and_its_page_keeps_looking(root: Path) -> None:
    (root / "coming").mkdir(parents=True)
    stored(root, "there")
    pages = site(root)
    overview = texts(plain(pages.show("/", "").body))
    assert "coming no run.json yet" in overview
    assert "3 of 6" in overview
    shown = pages.show("/run/coming", "")
    assert "keeps looking" in texts(plain(shown.body))
    assert "coming" in texts(plain(shown.frame))
    assert not pages.refresh("/run/coming", "", shown.drawn_from, [], []).again
    stored(root, "coming")
    assert pages.refresh("/run/coming", "", shown.drawn_from, [], []).again
    assert blocks_on(plain(pages.show("/run/coming", "").body), CHART)


@pytest.mark.parametrize("view", VIEWS, ids=NAMES)
def test_every_block_of_a_view_is_on_its_page_for_one_run_and_for_several(root: Path, view: Any) -> None:
    stored(root, "one").decide()
    stored(root, "two", steps=2)
    for path, search in ((f"/run/one/{view.name}", ""), (f"/compare/{view.name}", "?runs=one,two")):
        body = plain(site(root).show(path, search).body)
        charts = [block.id for block in view.blocks if isinstance(block, Chart)]
        assert blocks_on(body, CHART) == charts
        assert blocks_on(body, TEXT) == [block.id for block in view.blocks if block.id not in charts]


def test_a_refresh_brings_every_block_if_anything_is_new_else_nothing(root: Path) -> None:
    run = stored(root, "live")
    pages = site(root)
    shown = pages.show("/run/live/staleness", "")
    charts, tables = blocks_on(plain(shown.body), CHART), blocks_on(plain(shown.body), TEXT)
    same = pages.refresh("/run/live/staleness", "", shown.drawn_from, charts, tables)
    assert [*same.figures, *same.texts, same.drawn_from] == [no_update] * (len(charts) + len(tables) + 1)
    run.append(1)
    # Another site, for a reader may answer with its last look for some tenths of a second.
    fresh = site(root).refresh("/run/live/staleness", "", shown.drawn_from, charts, tables)
    assert no_update not in [*fresh.figures, *fresh.texts]
    assert fresh.drawn_from != shown.drawn_from
    assert "step 4 of 6" in texts(plain(fresh.frame))


def test_a_damaged_part_is_named_above_the_page_and_the_rest_is_drawn(root: Path) -> None:
    stored(root, "hurt")
    record = LogReader(LocalStore(root / "hurt"), layout.metrics("train", 0))
    damaged = next(found for found in iter(record.next, None) if found.kind == "data")
    path = root / "hurt" / layout.metrics("train", 0) / damaged.file
    path.write_bytes(path.read_bytes()[:-8] + b"\xff" * 8)
    shown = site(root).show("/run/hurt/learning", "")
    assert Path(damaged.file).name in texts(plain(shown.frame))
    assert blocks_on(plain(shown.body), CHART) == [block.id for block in VIEWS[2].blocks]


def test_a_run_that_vanishes_leaves_its_page_as_it_was_and_a_sentence(root: Path) -> None:
    stored(root, "gone")
    pages = site(root)
    shown = pages.show("/run/gone/ledger", "")
    (root / "gone" / "run.json").unlink()
    fresh = site(root).refresh("/run/gone/ledger", "", shown.drawn_from, [], ["ledger-balance"])
    assert fresh.texts == [no_update]
    assert not fresh.again
    assert "run.json" in texts(plain(fresh.frame))


def test_the_address_holds_how_charts_are_shown_and_every_view_keeps_it(root: Path) -> None:
    stored(root, "one", steps=6)
    shown = site(root).show("/run/one/learning", "?smooth=10&x=time")
    assert str(plain(shown.frame)).count("smooth=10&x=time") == len([HOME, HOME_BY_TIME, *VIEWS, TRAJECTORIES])
    plainly = site(root).show("/run/one/learning", "")
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
    ],
)
def test_an_address_that_leads_nowhere_is_answered_by_one_short_sentence(path: str, search: str) -> None:
    answer = address.parse(path, search, ["one"], NAMES)
    assert isinstance(answer, address.NotFound)
    assert 0 < len(answer.sentence) < 200


def test_addresses_of_pages_are_answered_and_others_with_404(root: Path) -> None:
    stored(root, "one")
    page = client(root)
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


def asked_to_show(**changed: Any) -> dict[str, Any]:
    """What Dash's script sends when a page is opened."""
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


def test_a_page_is_shown_and_every_callback_of_the_app_is_known(root: Path) -> None:
    stored(root, "one")
    page = client(root)
    answer = page.post("/_dash-update-component", json=asked_to_show(), headers=LOCAL)
    assert answer.status_code == 200
    assert answer.json["response"]["shown"]["data"]["path"] == "/run/one"
    known = {one["output"] for one in page.get("/_dash-dependencies", headers=LOCAL).json}
    for output in known:
        assert is_callback(asked_to_show(output=output), known)


def test_a_question_that_no_page_asks_is_refused_without_an_exception(root: Path) -> None:
    stored(root, "one")
    page = client(root)
    for body in (
        [],
        3,
        {},
        asked_to_show(output=1),
        asked_to_show(output="frame.children"),
        asked_to_show(outputs=3),
        asked_to_show(inputs=[1]),
        asked_to_show(inputs=[{"id": "address", "property": "pathname", "value": 5}]),
        asked_to_show(inputs=None),
        asked_to_show(state=[{"id": "shown", "property": "data", "value": 7}]),
        asked_to_show(changedPropIds=[None]),
    ):
        assert page.post("/_dash-update-component", json=body, headers=LOCAL).status_code == 400, body
    nested = page.post("/_dash-update-component", data=b"[" * 50_000, headers=LOCAL, content_type="application/json")
    assert nested.status_code == 400


def senseless_questions(page: FlaskClient) -> Iterator[dict[str, Any]]:
    """The questions of every callback of the app, with values, and numbers of them, that no page sends."""
    for one in page.get("/_dash-dependencies", headers=LOCAL).json:
        yield asked_to_show(output=one["output"])
        yield asked_to_show(output=one["output"], inputs=[])
        yield asked_to_show(output=one["output"], outputs=[], state=[])
        shown = {"id": "shown", "property": "data", "value": {"path": "/run/one", "page": "run", "found": 3}}
        yield asked_to_show(output=one["output"], state=[shown] * 4)


def test_a_question_of_the_right_form_and_without_sense_is_refused(root: Path) -> None:
    stored(root, "one")
    page = client(root)
    asked = senseless_questions(page)
    answers = {page.post("/_dash-update-component", json=body, headers=LOCAL).status_code for body in asked}
    assert 400 in answers
    assert answers <= {200, 204, 400}


def test_the_token_guards_the_page_its_callbacks_its_scripts_and_the_metrics(root: Path) -> None:
    stored(root, "one")
    page = client(root, host="0.0.0.0", token="a-token-of-some-length")
    paths = ("/", "/_dash-layout", "/_dash-dependencies", "/assets/style.css", "/metrics", "/run/one")
    for path in paths:
        assert page.get(path).status_code == 401, path
        assert page.get(path, headers={"Authorization": "Bearer a-token-of-some-length"}).status_code == 200, path
    assert page.post("/_dash-update-component", json={}).status_code == 401


def test_the_app_is_no_development_server(root: Path) -> None:
    page = client(root)
    config = page.get("/", headers=LOCAL).text
    assert '"ui":false' in config
    assert '"validate_callbacks":false' in config
    assert page.get("/_mcp", headers=LOCAL).status_code == 404
    assert page.get("/console", headers=LOCAL).status_code == 404


@pytest.mark.parametrize(("ratio", "said"), [(1.02, False), (0.9, True)])
def test_the_top_of_a_page_says_that_the_length_is_biased(root: Path, ratio: float, said: bool) -> None:
    run = stored(root, "biased")
    metrics = StreamWriter(run.store, layout.metrics("train", 0), METRIC, "train-0")
    rows = metric_rows({"length_ratio": ratio}, incarnation=0, t=run.t_now, policy_version=run.policy_version)
    metrics.write(pa.concat_tables([rows] * 20), tokens=0)
    assert (f"trained ÷ taken length {ratio:.3f}" in texts(plain(site(root).show("/run/biased", "").frame))) == said
