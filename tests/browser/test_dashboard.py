"""The dashboard in a browser draws the numbers of the store, at most three seconds after a commit."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from dash._utils import to_json
from playwright.sync_api import Page, expect
from support.pages.dashboard_page import Watched, plain, served
from support.pages.sites import TOKEN, store_run
from support.stored_run.run import Shape, make_run

from dashboard.pages.site import VIEWS
from dashboard.read.run_reader import RunReader
from dashboard.views.blocks import Chart, View
from dashboard.views.comparison import COMPARISON
from storage import layout
from storage.schema import CONSUMED, METRIC
from storage.stores.factory import open_store
from storage.stores.local import LocalStore
from storage.streams.log import LogReader
from storage.streams.stream import StreamReader, StreamWriter

pytestmark = pytest.mark.browser

SECONDS = 3.0
"""From a commit until the page shows it, at most."""
NAMES = [view.name for view in VIEWS]
EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


@pytest.fixture(scope="module")
def finished(root: Path) -> str:
    run = make_run(LocalStore(root / "finished", fsync=False), "finished", Shape(steps=12, seed=3))
    run.decide()
    run.finish()
    return "finished"


def rows(root: Path, run_id: str, path: str, schema: pa.Schema) -> pa.Table:
    """The rows of a stream, read without the dashboard's code."""
    reader = StreamReader(open_store(str(root / run_id)), path, schema)
    return pa.concat_tables(part.table for part in iter(reader.next, None))


def trained_staleness(root: Path, run_id: str) -> tuple[list[int], list[float], list[int]]:
    """Policy versions, and the mean and largest staleness of the groups trained for each."""
    consumed = rows(root, run_id, layout.CONSUMED, CONSUMED)
    trained = consumed.filter(pc.equal(consumed["outcome"], "trained"))
    groups = trained.group_by(["policy_version", "group_id"]).aggregate([("staleness", "max")])
    figures = groups.group_by("policy_version").aggregate([("staleness_max", "mean"), ("staleness_max", "max")])
    names = ("policy_version", "staleness_max_mean", "staleness_max_max")
    return tuple(figures.sort_by("policy_version")[name].to_pylist() for name in names)


def wait_until_shown(is_shown: Callable[[], bool], since: float) -> float:
    """Returns the seconds from `since` (monotonic) until `is_shown`, looking every 50 ms. Fails after SECONDS."""
    while True:
        shown, waited = is_shown(), time.monotonic() - since
        assert waited <= SECONDS, f"{'only' if shown else 'not'} on the page {waited:.1f} s after the commit"
        if shown:
            return waited
        time.sleep(0.05)


@pytest.mark.parametrize("view", VIEWS, ids=NAMES)
def test_every_block_of_a_view_is_drawn_with_the_numbers_of_the_store(
    root: Path, finished: str, watched: Watched, view: View
) -> None:
    watched.open(f"/run/{finished}/{view.name}?smooth=1")
    run = RunReader(open_store(str(root / finished))).look()
    assert run.problems == ()
    for block in view.blocks_for([run]):
        expect(watched.page.locator(f"#{block.id} h2")).to_have_text(block.title)
        expect(watched.page.locator(f"#{block.id} .sentence")).to_have_text(block.sentence)
        built = block.build([run])
        if isinstance(block, Chart):
            drawn = watched.figure(block.id)
            expected = plain(json.loads(str(to_json(built)))["data"])
            assert [(t.get("x"), t.get("y"), t.get("z")) for t in drawn] == [
                (t.get("x"), t.get("y"), t.get("z")) for t in expected
            ], block.id
        elif built.rows:
            assert watched.rows(block.id) == [list(row) for row in built.rows], block.id
    expect(watched.page.locator(".problems")).to_have_count(0)
    watched.assert_quiet()


def test_staleness_reward_and_balance_are_those_that_the_streams_tell(
    root: Path, finished: str, watched: Watched
) -> None:
    versions, means, maxima = trained_staleness(root, finished)
    watched.open(f"/run/{finished}/staleness?smooth=1")
    mean, largest = (
        {t["name"]: t for t in watched.figure("staleness-over-time")}[name] for name in ("mean", "largest")
    )
    assert mean["x"] == versions
    assert mean["y"] == pytest.approx(means)
    assert largest["y"] == maxima
    metrics = rows(root, finished, layout.metrics("train", 0), METRIC)
    rewards = metrics.filter(pc.equal(metrics["name"], "reward_mean")).sort_by("policy_version")
    watched.open(f"/run/{finished}/learning?smooth=1")
    (reward,) = (t for t in watched.figure("learning-reward") if t["name"] == "reward")
    assert reward["y"] == pytest.approx(rewards["value"].to_pylist())
    parts = [
        record
        for generator in (0, 1)
        for record in iter(LogReader(open_store(str(root / finished)), layout.trajectories(generator)).next, None)
        if record.kind == "data"
    ]
    generated = [sum(part.rows for part in parts), sum(part.tokens for part in parts)]
    watched.open(f"/run/{finished}/ledger")
    first = watched.rows("ledger-balance")[0]
    assert first == ["generated", *(f"{amount:,}" for amount in generated)]
    expect(watched.page.locator("#ledger-balance .verdict.good")).to_be_visible()
    watched.assert_quiet()


def test_a_step_is_on_the_page_within_three_seconds_of_its_commit(root: Path, watched: Watched) -> None:
    run = store_run(root, "live", 3, Shape(steps=100))
    watched.open("/run/live/staleness")
    waits = []
    for version in range(4, 8):
        began = time.monotonic()
        run.append(1)
        waits.append(wait_until_shown(lambda expected=version: watched.newest_version() == expected, began))
        expect(watched.page.locator(".facts")).to_contain_text(f"step {version} of 100")
    print(f"seconds from commit to page: {[round(wait, 2) for wait in waits]}")
    _, means, _ = trained_staleness(root, "live")
    assert watched.figure("staleness-over-time")[0]["y"] == pytest.approx(means)
    watched.assert_quiet()


def test_zoom_and_hidden_lines_survive_refreshes(root: Path, watched: Watched) -> None:
    run = store_run(root, "zoomed", 8, Shape(steps=100))
    watched.open("/run/zoomed/staleness")
    chart = watched.page.locator("#staleness-over-time .js-plotly-plot")
    place = chart.locator(".nsewdrag").first.bounding_box()
    assert place is not None
    chart.locator(".legendtoggle").nth(1).click()
    visible = "gd => gd._fullData.map(trace => trace.visible)"
    expect(chart.locator(".legend .traces").nth(1)).to_have_css("opacity", "0.5")
    x, y = place["x"], place["y"] + place["height"] / 2
    watched.page.mouse.move(x + 0.3 * place["width"], y)
    watched.page.mouse.down()
    watched.page.mouse.move(x + 0.6 * place["width"], y, steps=5)
    watched.page.mouse.up()
    reach = "gd => gd._fullLayout.xaxis.range"
    wait_until_shown(lambda: chart.evaluate(reach)[0] > 1, time.monotonic())
    zoomed = chart.evaluate(reach)
    assert zoomed[1] < 8
    chart.evaluate("gd => { gd.marked = true; }")
    for version in (9, 10):
        began = time.monotonic()
        run.append(1)
        wait_until_shown(lambda expected=version: watched.newest_version() == expected, began)
        assert chart.evaluate(reach) == zoomed
        # A mean and its faint values, twice, and the bound.
        assert chart.evaluate(visible) == [True, True, "legendonly", "legendonly", True]
        assert chart.evaluate("gd => gd.marked"), "the figure was put up again instead of being updated"
    watched.assert_quiet()


def test_the_overview_lists_runs_and_ticks_lead_to_their_comparison(
    root: Path, finished: str, watched: Watched
) -> None:
    store_run(root, "other", 5, Shape(steps=20))
    page = watched.page
    # By name: by verdict, the run's row would move when it no longer counts as running.
    watched.open("/?sort=run")
    line = page.locator("tr", has=page.get_by_role("link", name="other", exact=True))
    expect(line).to_contain_text("5 of 20")
    expect(line).to_contain_text("running")
    for run_id in (finished, "other"):
        page.get_by_title(f"compare {run_id}", exact=True).click()
        expect(page.get_by_title(f"do not compare {run_id}")).to_be_visible()
    page.get_by_role("link", name="Compare 2 runs").click()
    page.wait_for_selector("#compare-reward-mean .js-plotly-plot")
    for view in (COMPARISON, *VIEWS):
        page.get_by_role("link", name=view.title, exact=True).click()
        for block in view.blocks:
            if block.requires is None:
                expect(page.locator(f"#{block.id}")).to_be_attached()
    page.get_by_role("link", name="Learning", exact=True).click()
    names = {trace["name"] for trace in watched.figure("learning-loss")}
    assert names == {finished, "other"}
    page.go_back()
    expect(page.locator("#record-changed")).to_be_visible()
    watched.assert_quiet()


def test_what_a_store_holds_is_text_on_the_page_and_never_markup(root: Path, watched: Watched) -> None:
    run = store_run(root, "hostile", 2)
    row = rows(root, "hostile", layout.CONSUMED, CONSUMED).slice(0, 1).to_pylist()[0]
    evil = pa.Table.from_pylist([{**row, "outcome": EVIL, "policy_version": 2, "t": time.time()}], schema=CONSUMED)
    StreamWriter(run.store, layout.CONSUMED, CONSUMED, EVIL).write(evil, tokens=1)
    measured = {"t": time.time(), "incarnation": 0, "policy_version": 2, "name": f"time/{EVIL}/seconds", "value": 1.0}
    table = pa.Table.from_pylist([measured], schema=METRIC)
    StreamWriter(run.store, layout.metrics("train", 0), METRIC, EVIL).write(table, tokens=0)
    run.store.put(layout.evaluation(2), json.dumps({"policy_version": EVIL}).encode())
    seen = ""
    for view in (*NAMES, "trajectories"):
        watched.open(f"/run/hostile/{view}")
        watched.page.wait_for_timeout(1500)
        seen += watched.page.locator("body").inner_text()
        assert watched.page.evaluate("window.hacked === undefined"), view
        assert watched.page.locator("img[src=x]").count() == 0, view
    assert EVIL in seen, "the hostile text is on no page, so nothing was shown"
    watched.open("/")
    assert watched.page.evaluate("window.hacked === undefined")
    watched.assert_quiet()


def test_the_token_opens_the_page_once_and_leaves_the_address(root: Path, finished: str, page: Page) -> None:
    with served(root, "--token", TOKEN) as address:
        page.goto(address)
        expect(page.locator("body")).to_contain_text("the dashboard needs its token")
        page.goto(f"{address}/run/{finished}?token={TOKEN}")
        expect(page.locator("h1")).to_have_text(finished)
        assert TOKEN not in page.url
        page.goto(f"{address}/run/{finished}/flow")
        expect(page.locator("#flow-tracks .js-plotly-plot")).to_be_visible()
        assert TOKEN not in page.evaluate("document.cookie")
