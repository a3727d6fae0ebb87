"""Names, settings and notes in the table of all runs and in a comparison are text, never markup."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect
from support.pages.dashboard_page import Watched
from support.pages.sites import store_run

from millrace.runs.record import write_note
from storage import layout

pytestmark = pytest.mark.browser

EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


@pytest.fixture(scope="module", autouse=True)
def runs(root: Path) -> None:
    for name in ("plain", "evil"):
        run = store_run(root, name, 2)
    record = json.loads(bytes(run.store.get(layout.RUN)))
    record["config"]["training"] |= {"learning_rate": EVIL, EVIL: EVIL}
    run.store.put(layout.RUN, json.dumps(record).encode())
    write_note(run.store, EVIL)


@pytest.mark.parametrize(
    "path", [f"/?column=training.learning_rate&column={EVIL}&filter={EVIL.split()[0]}", "/compare?runs=evil,plain"]
)
def test_names_settings_and_notes_are_text_and_never_markup(watched: Watched, path: str) -> None:
    watched.open(path)
    expect(watched.page.locator("#page")).to_contain_text(EVIL)
    assert watched.page.evaluate("window.hacked === undefined")
    assert watched.page.locator("img[src=x]").count() == 0
    watched.assert_quiet()
