"""The page of evaluations in a browser: a chosen version is compared, and answers stay text."""

from pathlib import Path

import pytest
from playwright.sync_api import expect
from support.evaluation.evaluated import evaluate
from support.pages.dashboard_page import Watched
from support.pages.sites import store_run

pytestmark = pytest.mark.browser

EVIL = '<img src=x onerror="window.hacked=1">'


def test_a_chosen_version_is_compared_and_answers_are_text(root: Path, watched: Watched) -> None:
    run = store_run(root, "evaluated")
    for version, right in enumerate(((True, False), (False, False), (True, True))):
        rewards = dict(zip("ab", map(float, right), strict=True))
        evaluate(run.store, version, {prompt: [(EVIL, reward)] for prompt, reward in rewards.items()})
    watched.open("/run/evaluated/evaluation")
    page = watched.page
    changes = page.locator("#evaluation-questions tbody td:first-child")
    expect(changes).to_have_text(["✓ wrong → right", "still right"])
    page.get_by_label("After", exact=True).first.click()
    page.get_by_role("option", name="version 1,").click()
    expect(changes).to_have_text(["✕ right → wrong", "still wrong"])
    assert page.url.endswith("/run/evaluated/evaluation?before=0&after=1")
    expect(page.locator("#evaluation-questions td").nth(4)).to_have_text(EVIL)
    assert page.evaluate("window.hacked") is None
    page.go_back()
    expect(changes).to_have_text(["✓ wrong → right", "still right"])
