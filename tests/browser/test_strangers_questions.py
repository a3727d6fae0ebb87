"""The first questions of a new user of the dashboard are answered after two clicks at most.

docs/dashboard.md lists the same questions and clicks.
"""

from contextlib import suppress
from pathlib import Path

import pytest
from playwright.sync_api import TimeoutError, expect
from support.campaigns.campaigns import REPOSITORY
from support.pages.dashboard_page import Watched
from support.stored_run.run import Shape, StoredRun

from storage.stores.local import LocalStore

pytestmark = pytest.mark.browser

_ATTEMPTS = 3
_LAYOUT_SHIFT = """() => new Promise(done => {
    let sum = 0;
    new PerformanceObserver(list => list.getEntries().forEach(entry => { sum += entry.value; }))
        .observe({ type: "layout-shift", buffered: true });
    setTimeout(() => done(sum), 500);
})"""


@pytest.fixture(scope="module", autouse=True)
def runs(root: Path) -> None:
    for name, bound in (("yesterday", 2), ("today", 4)):
        shape = Shape(steps=60, seed=3, max_staleness=bound, stale_share=0.2, steps_per_part=5)
        run = StoredRun(LocalStore(root / name, fsync=False), name, shape)
        run.evaluate(0.25)
        run.append(40)
        run.evaluate(0.5)


class Stranger:
    """Clicks, and counts."""

    def __init__(self, watched: Watched, path: str) -> None:
        watched.open(path)
        self.page = watched.page
        self.clicks = 0

    def click(self, role: str, name: str) -> None:
        """Follows a link. A click on one that is just being redrawn is lost, and repeated."""
        before = self.page.url
        for _ in range(_ATTEMPTS):
            self.page.get_by_role(role, name=name).first.click()  # type: ignore[arg-type]
            with suppress(TimeoutError):
                self.page.wait_for_url(lambda url: url != before, timeout=10_000, wait_until="commit")
            if self.page.url != before:
                break
        self.clicks += 1


def test_health_bottleneck_and_staleness_take_the_click_that_opens_the_run(watched: Watched) -> None:
    stranger = Stranger(watched, "/")
    stranger.click("link", "today")
    clauses = stranger.page.locator(".clauses a")
    expect(clauses.nth(1)).to_contain_text("healthy: no alarm")
    expect(clauses.nth(2)).to_contain_text("no stage is always busy: train idle 12%, generate idle 23%")
    expect(clauses.nth(3)).to_contain_text("of the rollouts were too old and dropped")
    expect(clauses.nth(3)).to_have_class("warning")
    expect(stranger.page.locator(".advice")).to_contain_text("Set staleness.too_old to keep")
    assert stranger.clicks == 1


def test_a_clause_leads_to_the_chart_that_shows_it(watched: Watched) -> None:
    stranger = Stranger(watched, "/")
    stranger.click("link", "today")
    stranger.click("link", "too old and dropped")
    expect(stranger.page.locator("#staleness-outcomes")).to_be_in_viewport()
    assert stranger.clicks == 2


def test_what_changed_against_yesterdays_run_takes_two_clicks(watched: Watched) -> None:
    stranger = Stranger(watched, "/")
    stranger.click("link", "today")
    stranger.click("link", "Compare with yesterday, the run before it")
    line = stranger.page.locator("#compare-config tbody tr").first
    expect(line.locator("td")).to_have_text(["staleness.max_staleness", "4", "2"])
    assert stranger.clicks == 2


def test_a_failure_is_shown_after_two_clicks(watched: Watched) -> None:
    stranger = Stranger(watched, "/")
    stranger.click("link", "today")
    stranger.click("link", "worst")
    expect(stranger.page.locator("#trajectories-opened")).to_contain_text("reward 0")
    assert stranger.clicks == 2


def test_the_table_of_runs_answers_what_needs_attention_and_where_the_time_goes_in_a_click(watched: Watched) -> None:
    stranger = Stranger(watched, "/")
    row = stranger.page.locator("tr", has=stranger.page.get_by_role("link", name="today", exact=True))
    expect(row).to_contain_text("0.500 0.45–0.55")
    row.get_by_role("link", name="train 88%").click()
    expect(stranger.page.locator("#flow-idle")).to_be_in_viewport()
    stranger = Stranger(watched, "/")
    stranger.click("link", "2 need attention")
    expect(stranger.page.locator("tbody tr")).to_have_count(2)


def test_what_changed_takes_a_click_on_the_difference_to_the_run_before(watched: Watched) -> None:
    stranger = Stranger(watched, "/")
    stranger.page.get_by_title("compare with yesterday, the run before it").click()
    expect(stranger.page.locator("#compare-config")).to_contain_text("staleness.max_staleness")


def test_the_theme_is_switched_and_kept_and_nothing_of_the_page_moves_while_it_is_drawn(watched: Watched) -> None:
    page = watched.page
    watched.open("/run/today")
    assert page.evaluate(_LAYOUT_SHIFT) < 0.1
    page.get_by_text("Dark", exact=True).click()
    expect(page.locator("html")).to_have_attribute("data-mantine-color-scheme", "dark")
    watched.open("/")
    expect(page.locator("html")).to_have_attribute("data-mantine-color-scheme", "dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 17, 21)"
    watched.assert_quiet()


@pytest.mark.parametrize(
    "path", ["/", "/run/today", "/run/today/record", "/run/today/trajectories", "/compare?runs=today"]
)
def test_nothing_moves_on_a_narrow_screen_while_a_page_is_drawn(watched: Watched, path: str) -> None:
    watched.page.set_viewport_size({"width": 400, "height": 800})
    watched.open(path)
    if path.endswith("trajectories"):
        watched.page.wait_for_selector("#trajectories-found > *")
    assert watched.page.evaluate(_LAYOUT_SHIFT) < 0.1


def test_the_docs_have_the_same_questions() -> None:
    text = (REPOSITORY / "docs" / "dashboard.md").read_text()
    questions = ("Is it healthy?", "What limits it?", "Is it too stale?", "What changed against", "Show me a failure")
    assert [question for question in questions if question not in text] == []
