"""A run's home page in a browser: all of it on one screen, and text of models that stays text."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect
from support.pages.dashboard_page import Watched
from support.pages.sites import store_run
from support.stored_run.run import Shape

from millrace.runs.incidents import record_incident
from millrace.runs.record import read_run
from storage import layout
from storage.stores.local import LocalStore

pytestmark = pytest.mark.browser

EVIL = '<img src=x onerror="window.hacked=1">'


@pytest.fixture(scope="module", autouse=True)
def run(root: Path) -> None:
    stored = store_run(root, "home", 30, Shape(steps=40, seed=3))
    stored.decide()
    store = stored.store
    record_incident(store, "probe.alarm", {"sentence": EVIL})
    changes = {f"training.setting_{number}": [number, EVIL] for number in range(9)}
    origin = {"preset": "tiny-cpu", "changes": changes, "flow_run": "http://127.0.0.1:4200/flow-runs/flow-run/1"}
    store.put(layout.RUN, json.dumps({**read_run(store), "origin": origin}).encode())


def test_verdict_pipeline_charts_and_rail_are_on_one_screen_of_1280_by_800(watched: Watched) -> None:
    watched.open("/run/home")
    assert watched.page.viewport_size == {"width": 1280, "height": 800}
    rail = watched.page.locator("#rail")
    expect(rail).to_contain_text("balanced")
    expect(rail).to_contain_text(EVIL)
    for part in ("[aria-label=verdict]", "[aria-label=pipeline]", "#home-charts", "#rail"):
        # Looks again if the part is being redrawn.
        expect(watched.page.locator(part)).to_be_in_viewport(ratio=1)
    assert watched.page.evaluate("window.hacked === undefined")
    assert watched.page.locator("img[src=x]").count() == 0
    watched.assert_quiet()


def test_a_group_of_the_rail_is_one_click_away_and_the_rail_follows_the_run(root: Path, watched: Watched) -> None:
    watched.open("/run/home")
    rail = watched.page.locator("#rail")
    expect(rail).to_contain_text("reward")
    record_incident(LocalStore(root / "home", fsync=False), "selection.starving", {"sentence": "no group had spread"})
    expect(rail).to_contain_text("no group had spread")
    rail.get_by_role("link", name="worst").click()
    expect(watched.page.locator("#trajectories-opened")).to_contain_text("Group ")
    watched.assert_quiet()
