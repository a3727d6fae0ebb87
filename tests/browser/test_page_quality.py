"""Pages that everybody can read: no complaint of axe, named elements, and a notice when the server is gone."""

import signal
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from support.evaluation.evaluated import evaluate
from support.pages.dashboard_page import Watched, served_process
from support.stored_run.run import Shape, make_run

from dashboard.pages.site import VIEWS
from dashboard.views.blocks import Chart
from flows.deployment.server import free_port
from storage.stores.local import LocalStore

pytestmark = pytest.mark.browser

AXE = (files("axe_playwright_python") / "axe.min.js").read_text()
NAMES = [view.name for view in VIEWS]
PAGES = [
    "/",
    "/?runs=read&filter=read&sort=step&column=training.max_steps",
    "/?filter=nothing",
    "/run/nobody",
    "/run/read",
    *(f"/run/read/{name}" for name in (*NAMES, "trajectories", "trajectories?group=1")),
    "/compare?runs=read,other",
    "/compare/summary?runs=read,other&x=time",
    "/compare/staleness?runs=read,other",
    "/compare/flow?runs=read,other",
]


@pytest.fixture(scope="module", autouse=True)
def runs(root: Path) -> None:
    for name in ("read", "other"):
        run = make_run(LocalStore(root / name, fsync=False), name, Shape(steps=12, seed=3))
        for version in (0, 12):
            evaluate(run.store, version, {"a": [("A", 1.0)], "b": [("x", 0.0)]})
        run.finish()


def complaints(page: Page) -> list[str]:
    """Each rule of axe that the page breaks, with the elements that break it."""
    page.evaluate(AXE)
    result: dict[str, Any] = page.evaluate("axe.run()")
    assert result["passes"], "axe has looked at nothing"
    return [f"{rule['id']}: {[node['html'][:150] for node in rule['nodes']][:3]}" for rule in result["violations"]]


@pytest.mark.extended
@pytest.mark.parametrize("path", PAGES)
def test_axe_finds_nothing_on_a_page(watched: Watched, path: str) -> None:
    watched.open(path)
    watched.page.wait_for_timeout(500)
    for scheme in ("light", "dark"):
        watched.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        assert complaints(watched.page) == [], scheme


def test_a_page_says_what_it_is_and_where_one_is(watched: Watched) -> None:
    page = watched.page
    watched.open("/")
    expect(page).to_have_title("Runs · Millrace")
    assert page.locator("html").get_attribute("lang") == "en"
    watched.open("/run/read/flow")
    expect(page).to_have_title("Flow · read · Millrace")
    expect(page.locator("nav [aria-current=page]")).to_have_text("Flow")
    page.get_by_role("link", name="Learning", exact=True).click()
    expect(page).to_have_title("Learning · read · Millrace")
    expect(page.locator("nav [aria-current=page]")).to_have_text("Learning")
    page.wait_for_selector("#learning-loss", state="attached")
    watched.unfold()
    for block in next(view.blocks for view in VIEWS if view.name == "learning"):
        if isinstance(block, Chart):
            expect(page.get_by_role("figure", name=block.title, exact=True)).to_be_visible()


def test_a_page_says_that_an_answer_was_cut_off_and_loads_itself_again(watched: Watched) -> None:
    page, banner = watched.page, watched.page.locator("#connection")
    page.add_init_script(
        """const ask = window.fetch;
        const body = () => new ReadableStream({ start: (stream) => stream.error(new TypeError("cut off")) });
        window.fetch = async (...question) => window.cut ? new Response(body()) : ask(...question);"""
    )
    watched.open("/run/read/ledger")
    page.evaluate("() => { window.cut = true; }")
    expect(banner).to_contain_text("does not answer")
    page.wait_for_function("() => !window.cut")
    expect(banner).to_be_hidden()
    expect(page.locator("#ledger-balance")).to_be_visible()


def test_a_page_whose_server_is_stopped_or_gone_says_so_until_it_is_back(root: Path, page: Page) -> None:
    port = free_port()
    banner, balance = page.locator("#connection"), page.locator("#ledger-balance")
    with served_process(root, port) as (address, server):
        page.goto(f"{address}/run/read/ledger")
        expect(balance).to_be_visible()
        expect(banner).to_be_hidden()
        server.send_signal(signal.SIGSTOP)
        expect(banner).to_contain_text("has not answered for")
        server.send_signal(signal.SIGCONT)
        expect(banner).to_be_hidden()
    expect(banner).to_contain_text("does not answer")
    expect(balance).to_be_visible()
    with served_process(root, port):
        expect(banner).to_be_hidden()
        expect(balance).to_be_visible()
