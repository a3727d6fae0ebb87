"""The page of trajectories as a person uses it: a query, its link, a group, the way back."""

from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from playwright.sync_api import expect
from support.pages.dashboard_page import Watched
from support.pages.sites import store_run
from support.stored_run.run import Shape

from dashboard.read.groups import GroupReader
from dashboard.read.model import RunData
from dashboard.read.run_reader import RunReader
from storage.stores.local import LocalStore

pytestmark = pytest.mark.browser

RUN = "searched"
PAGE = f"/run/{RUN}/trajectories"


@pytest.fixture(scope="module")
def run(root: Path) -> RunData:
    """A run of twelve steps of six groups."""
    shape = Shape(steps=12, groups_per_step=6, generators=2, max_staleness=2, stale_share=0.2, error_share=0.2, seed=7)
    return RunReader(store_run(root, RUN, 12, shape).store).look()


def test_a_typed_query_is_in_the_address_and_back_leads_to_the_one_before(run: RunData, watched: Watched) -> None:
    page = watched.page
    firsts = run.consumed["sample_index"] == 0
    watched.open(f"{PAGE}?version=7")
    expect(page.locator("#trajectories-version")).to_have_value("7")
    of_version = np.count_nonzero(firsts & (run.consumed["policy_version"] == 7))
    expect(page.locator("#trajectories-found .note")).to_contain_text(f"{of_version} groups found")

    page.locator("#trajectories-version").fill("3..5")
    page.locator("#trajectories-generator").fill("1")
    page.locator("#trajectories-search").click()
    some = firsts & (run.consumed["policy_version"] >= 3) & (run.consumed["policy_version"] <= 5)
    some &= run.consumed["generator"] == 1
    expect(page.locator("#trajectories-found .note")).to_contain_text(f"{np.count_nonzero(some)} groups found")
    assert urlsplit(page.url).query == "generator=1&version=3..5"

    page.locator("#trajectories-reward").fill("1..0")
    page.locator("#trajectories-reward").press("Enter")
    expect(page.locator("#trajectories-found")).to_contain_text("reward is '1..0'; expected a range whose first number")
    page.go_back()
    expect(page.locator("#trajectories-version")).to_have_value("7")
    expect(page.locator("#trajectories-found .note")).to_contain_text(f"{of_version} groups found")
    watched.assert_quiet()


def test_a_group_is_opened_by_its_link_and_each_token_tells_its_ratio(
    root: Path, run: RunData, watched: Watched
) -> None:
    page = watched.page
    watched.open(f"{PAGE}?outcome=trained")
    page.locator("#trajectories-found td a").first.click()
    page.wait_for_selector("#trajectories-opened .token")
    generator, row = (int(word) for word in urlsplit(page.url).query.rpartition("open=")[2].split("."))
    group = GroupReader(LocalStore(root / RUN), run.info.config).read(run, generator, row)
    expect(page.locator("#trajectories-opened h2")).to_have_text(f"Group {group.group_id}")
    shown = page.locator("#trajectories-opened .token").evaluate_all("tokens => tokens.map(token => token.title)")
    expected: list[str] = []
    for response in group.responses:
        assert response.trajectory is not None
        ratios = response.importance_ratios
        tokens = len(response.trajectory["response_tokens"])
        expected += ["not trained"] * tokens if ratios is None else [f"π/μ {ratio:.6g}" for ratio in ratios]
    # Responses are sorted by reward.
    assert sorted(title.rpartition(", ")[2] for title in shown) == sorted(expected)
    assert any("π/μ" in title for title in shown)
    # The list stays above it, and the page's own refresh takes neither away.
    page.wait_for_timeout(2500)
    assert page.locator("#trajectories-opened .token").count() == len(shown)
    watched.assert_quiet()


def test_a_group_leads_to_its_prompt_at_other_versions(root: Path, watched: Watched) -> None:
    shape = Shape(steps=10, groups_per_step=4, generators=2, prompts=12, stale_share=0.0)
    store_run(root, "epochs", 10, shape)
    page = watched.page
    watched.open("/run/epochs/trajectories?group=17")
    bars = page.locator("#trajectories-timeline .track")
    expect(bars).to_have_count(4)
    assert "sampled by version" in (bars.first.get_attribute("aria-label") or "")

    page.get_by_text("The same prompt at other versions").click()
    columns = page.locator("#trajectories-versions .version")
    expect(columns).to_have_count(3)
    expect(columns.nth(1)).to_contain_text("this group")
    expect(columns.nth(0).locator(".tokens")).to_have_count(4)
    columns.nth(2).get_by_role("link", name="group 29").click()
    expect(page.locator("#trajectories-opened h2")).to_have_text("Group 29")
    page.go_back()
    expect(columns).to_have_count(3)
    watched.assert_quiet()


def test_a_live_page_shows_each_newest_group_until_it_is_told_to_stop(root: Path, watched: Watched) -> None:
    page = watched.page
    growing = store_run(root, "growing", 3, Shape(steps=10, groups_per_step=2))

    def newest() -> str:
        consumed = RunReader(growing.store).look().consumed
        return f"Group {consumed['group_id'][consumed['sample_index'] == 0][-1]}"

    watched.open("/run/growing/trajectories")
    expect(page.locator("#trajectories-found .note")).to_be_visible()
    page.get_by_label("newest, live").check()
    page.locator("#trajectories-search").click()
    for _ in range(2):
        expect(page.locator("#trajectories-opened h2")).to_have_text(newest())
        growing.append(1)
    expect(page.locator("#trajectories-opened h2")).to_have_text(newest())

    page.get_by_label("newest first").check()
    page.locator("#trajectories-search").click()
    groups = page.locator("#trajectories-found .note")
    expect(page.locator("#trajectories-opened")).to_have_count(0)
    found = groups.inner_text()
    growing.append(1)
    page.wait_for_timeout(2500)
    assert groups.inner_text() == found
    watched.assert_quiet()
