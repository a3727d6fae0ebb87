"""The dashboard without a browser: what stands at an address, what a refresh brings, what strangers are answered."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dash import no_update
from dash._utils import to_json
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
from dashboard.views.display import PLAIN, Display
from dashboard.views.home import HOME, HOME_BY_TIME
from dashboard.views.per_run import MINUTES
from dashboard.views.registry import VIEWS
from millrace.runs.record import end_attempt
from storage import layout
from storage.progress import read_status, write_progress
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


def test_an_empty_root_says_so_and_the_page_finds_a_run_that_is_made_later(root: Path) -> None:
    pages = site(root)
    shown = pages.show("/", "")
    assert f"There is no run in {root} yet" in texts(plain(shown.body))
    stored(root, "late")
    fresh = Site(Runs(str(root)), VIEWS).refresh("/", "", shown.drawn_from, [], blocks_on(plain(shown.body), TEXT))
    assert "late" in texts(plain(fresh.texts))
    assert "3 of 6" in texts(plain(fresh.texts))


def test_the_overview_has_a_column_of_measured_and_planned_once_a_run_has_a_plan(root: Path) -> None:
    stored(root, "one")
    stored(root, "planned")
    assert "÷" not in texts(plain(site(root).show("/", "").body))
    record = root / "planned" / layout.RUN
    values = json.loads(record.read_text())
    values["config"]["plan"] = {"step_seconds": 2.0, "staleness_mean": None}
    record.write_text(json.dumps(values))
    overview = texts(plain(site(root).show("/", "").body))
    assert "measured ÷ planned" in overview
    assert "seconds per step 0.50" in overview


def test_a_run_that_is_being_created_is_named_in_the_overview_and_its_page_goes_on_looking(root: Path) -> None:
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
def test_every_block_of_a_view_stands_on_its_page_with_its_title_and_sentence(root: Path, view: Any) -> None:
    stored(root, "one").decide()
    stored(root, "two", steps=2)
    for path, search in ((f"/run/one/{view.name}", ""), (f"/compare/{view.name}", "?runs=one,two")):
        body = plain(site(root).show(path, search).body)
        charts = [block.id for block in view.blocks if isinstance(block, Chart)]
        assert blocks_on(body, CHART) == charts
        assert blocks_on(body, TEXT) == [block.id for block in view.blocks if block.id not in charts]
        for block in view.blocks:
            assert block.title in texts(body)
            assert block.sentence in texts(body)


def test_a_refresh_brings_nothing_where_nothing_is_new_and_every_block_where_something_is(root: Path) -> None:
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


def test_blocks_that_are_on_the_page_no_longer_are_left_alone(root: Path) -> None:
    stored(root, "live")
    fresh = site(root).refresh(
        "/run/live/flow", "", {"page": "RunPage", "found": ["live"], "seen": []}, ["staleness-over-time"], ["overview"]
    )
    assert [*fresh.figures, *fresh.texts] == [no_update, no_update]


def test_blocks_of_what_a_run_did_not_measure_are_left_out_until_it_does(root: Path) -> None:
    run = stored(root, "growing")
    records = {g: read_status(run.store, "generate", g) for g in range(SHAPE.generators)}
    for g, record in records.items():
        older = {name: value for name, value in record.items() if not name.endswith("_in_flight")}
        write_progress(run.store, "generate", g, older)
    shown = site(root).show("/run/growing/flow", "")
    charts, tables = blocks_on(plain(shown.body), CHART), blocks_on(plain(shown.body), TEXT)
    assert "flow-times" in tables
    assert "flow-in-flight" not in tables
    for g, record in records.items():
        write_progress(run.store, "generate", g, record)
    assert site(root).refresh("/run/growing/flow", "", shown.drawn_from, charts, tables).again
    assert "flow-in-flight" in blocks_on(plain(site(root).show("/run/growing/flow", "").body), TEXT)


def test_the_top_of_every_page_says_that_the_length_is_biased(root: Path) -> None:
    run = stored(root, "biased")
    metrics = StreamWriter(run.store, layout.metrics("train", 0), METRIC, "train-0")
    for ratio, told in ((1.02, False), (0.9, True)):
        at = {"t": run.t_now, "policy_version": run.policy_version}
        rows = metric_rows({"length_ratio": ratio}, incarnation=0, **at)
        metrics.write(pa.concat_tables([rows] * 20), tokens=0)
        for view in NAMES:
            top = texts(plain(site(root).show(f"/run/biased/{view}", "").frame))
            assert ("trained ÷ taken length 0.900, outside 0.97 to 1.03" in top) == told


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


def test_a_run_opens_on_its_home_page_with_verdict_pipeline_and_charts(root: Path) -> None:
    stored(root, "home")
    shown = site(root).show("/run/home", "")
    frame = texts(plain(shown.frame))
    assert "Advice:" in frame
    assert "scored, not taken" in frame
    assert blocks_on(plain(shown.body), CHART) == ["home-charts"]
    assert blocks_on(plain(site(root).show("/run/home/home-time", "").body), CHART) == ["home-time-charts"]
    assert "scored, not taken" not in texts(plain(site(root).show("/run/home/flow", "").frame))


def test_the_frame_tells_how_the_run_does(root: Path) -> None:
    run = stored(root, "told", steps=6)
    run.finish()
    frame = texts(plain(site(root).show("/run/told", "").frame))
    status = json.loads(to_json(Runs(str(root)).reader("told").look().status))
    assert f"step {status['steps']} of {status['max_steps']}" in frame
    staleness = status["staleness"]
    assert f"mean {staleness['mean']:.2f}, largest {staleness['max']}, bound {SHAPE.max_staleness}" in frame
    assert f"reward {status['reward_mean']:.3f}" in frame
    assert "finished" in frame


def test_the_trajectories_of_one_run_have_a_page_and_those_of_several_have_none(root: Path) -> None:
    stored(root, "one")
    views = [view.name for view in (HOME, HOME_BY_TIME, *VIEWS, TRAJECTORIES)]
    assert address.parse("/run/one/trajectories", "?group=1", ["one"], views) == address.RunPage(
        run_ids=("one",), view="trajectories", compared=False
    )
    assert site(root).is_not_found("/compare/trajectories", "?runs=one")
    assert not site(root).is_not_found("/run/one/trajectories", "?group=1")


def test_the_address_holds_how_charts_are_shown_and_every_view_keeps_it(root: Path) -> None:
    stored(root, "one", steps=6)
    views = [view.name for view in VIEWS]
    at = address.parse("/run/one/learning", "?smooth=10&x=time", ["one"], views)
    assert isinstance(at, address.RunPage)
    assert at.display == Display(smoothing=10, by_time=True)
    assert address.shown_as(at, at.display) == "/run/one/learning?smooth=10&x=time"
    assert address.shown_as(at, PLAIN) == "/run/one/learning"
    compared = address.parse("/compare/flow", "?runs=one&smooth=5", ["one"], views)
    assert isinstance(compared, address.RunPage)
    assert address.shown_as(compared, compared.display) == "/compare/flow?runs=one&smooth=5"

    shown = site(root).show("/run/one/learning", "?smooth=10&x=time")
    assert str(plain(shown.frame)).count("smooth=10&x=time") == len([HOME, HOME_BY_TIME, *VIEWS, TRAJECTORIES])
    plainly = site(root).show("/run/one/learning", "")
    assert str(plain(plainly.body)).count(MINUTES) == 0 < str(plain(shown.body)).count(MINUTES)


@pytest.mark.parametrize(
    ("path", "search", "sentence"),
    [
        ("/run/nobody", "", "There is no run 'nobody' here."),
        ("/run/one/nothing", "", "A run has no page 'nothing'"),
        ("/run/one/staleness/more", "", "There is no page"),
        ("/run/../../etc/passwd", "", "There is no page"),
        ("/run/..%2f..%2fetc%2fpasswd", "", "There is no run"),
        ("/run/<script>alert(1)</script>", "", "There is no"),
        ("/elsewhere", "", "There is no page '/elsewhere'."),
        ("/compare", "", "Name 1 to 8 runs"),
        ("/compare", "?runs=" + ",".join(f"r{i}" for i in range(9)), "Name 1 to 8 runs"),
        ("/compare", "?runs=one,nobody", "There is no run 'nobody' here."),
        ("/run/" + "x" * 10_000, "", "xxx…"),
        ("/run/one/learning", "?smooth=7", "smooth is '7': expected one of 1, 5, 10, 25, 50, 100."),
        ("/run/one/learning", "?x=colour", "x is 'colour': expected version or time."),
    ],
)
def test_an_address_that_leads_nowhere_says_why(path: str, search: str, sentence: str) -> None:
    found = address.parse(path, search, ["one"], NAMES)
    assert isinstance(found, address.NotFound)
    assert sentence in found.sentence
    assert len(found.sentence) < 200


def test_ticks_are_kept_in_the_address(root: Path) -> None:
    stored(root, "one")
    stored(root, "two")
    links = {
        part["props"]["title"]: part["props"]["href"]
        for part in within(plain(site(root).show("/", "?runs=one,nobody").body))
        if part["props"].get("className") == "tick"
    }
    assert links == {"do not compare one": "/", "compare two": "/?runs=one,two"}


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


def test_a_huge_question_is_refused(root: Path) -> None:
    stored(root, "one")
    response = client(root).post(
        "/_dash-update-component", data=b"[" * 70_000, headers=LOCAL, content_type="application/json"
    )
    assert response.status_code == 413


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
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
    ],
)
def test_a_question_that_no_page_asks_is_refused_without_an_exception(root: Path, body: object) -> None:
    stored(root, "one")
    assert client(root).post("/_dash-update-component", json=body, headers=LOCAL).status_code == 400


def senseless_questions(page: FlaskClient) -> Iterator[dict[str, Any]]:
    """The questions of every callback of the app, with values, and numbers of them, that no page sends."""
    for one in page.get("/_dash-dependencies", headers=LOCAL).json:
        yield asked_to_show(output=one["output"])
        yield asked_to_show(output=one["output"], inputs=[])
        yield asked_to_show(output=one["output"], outputs=[], state=[])
        shown = {"id": "shown", "property": "data", "value": {"path": "/run/one", "page": "run", "found": 3}}
        yield asked_to_show(output=one["output"], state=[shown] * 4)


def test_a_question_of_the_right_form_and_without_sense_gets_a_sentence(root: Path) -> None:
    stored(root, "one")
    page = client(root)
    answers = [page.post("/_dash-update-component", json=body, headers=LOCAL) for body in senseless_questions(page)]
    refused = [answer for answer in answers if answer.status_code == 400]
    assert refused
    assert {answer.text for answer in refused} == {"this page can't be updated as it is; load it again\n"}
    assert {answer.status_code for answer in answers} <= {200, 204, 400}


def test_a_question_nested_without_end_is_refused(root: Path) -> None:
    stored(root, "one")
    answer = client(root).post(
        "/_dash-update-component", data=b"[" * 50_000, headers=LOCAL, content_type="application/json"
    )
    assert answer.status_code == 400


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


def test_the_end_of_a_run_is_news(root: Path) -> None:
    run = stored(root, "again")
    shown = site(root).show("/run/again/ledger", "")
    end_attempt(run.store, 0, "stopped")
    fresh = site(root).refresh("/run/again/ledger", "", shown.drawn_from, [], ["ledger-balance"])
    assert no_update not in fresh.texts
