"""Tables and charts that a person saves, and the keys that replace the mouse."""

import csv
import io
import json
from pathlib import Path

import pytest
from playwright.sync_api import expect
from support.pages.dashboard_page import Watched
from support.pages.sites import store_run

from millrace.runs.record import write_note

pytestmark = pytest.mark.browser

# Once armed: the next page is answered after an update was requested, and that update is answered when it is released.
_LATE_UPDATE = """
    const ask = window.fetch;
    const pause = () => new Promise((done) => setTimeout(done, 20));
    const until = async (holds) => { while (!holds()) await pause(); };
    window.late = { armed: false, requested: false, released: false, answered: 0 };
    window.fetch = async (...question) => {
        const body = String(question[1]?.body), late = window.late, isHeld = late.armed;
        const isUpdate = body.includes('"changedPropIds":["tick.n_intervals"]');
        if (isUpdate && isHeld) late.requested = true;
        const answer = await ask(...question);
        if (isHeld) await until(() => isUpdate ? late.released : late.requested);
        if (isUpdate) late.answered += 1;
        return answer;
    };
"""


@pytest.fixture(scope="module", autouse=True)
def runs(root: Path) -> None:
    store_run(root, "saved").finish()
    write_note(store_run(root, "noted").store, "=1+1, <b>bold</b>")


def saved(watched: Watched, section: str, kind: str) -> str:
    with watched.page.expect_download() as download:
        watched.page.locator(section).get_by_role("button", name=kind, exact=True).click()
    assert download.value.suggested_filename.endswith(kind.lower())
    return download.value.path().read_text()


def test_a_table_is_saved_as_csv_and_json_as_it_is_shown(watched: Watched) -> None:
    watched.open("/run/saved/ledger")
    shown = watched.rows("ledger-balance")
    rows = list(csv.reader(io.StringIO(saved(watched, "#ledger-balance", "CSV"))))
    assert rows[1:] == [[name, *(cell.replace(",", "") for cell in cells)] for name, *cells in shown]
    first = json.loads(saved(watched, "#ledger-balance", "JSON"))[0]
    assert (first["name"], first["rollouts"]) == ("generated", int(shown[0][1].replace(",", "")))
    watched.assert_quiet()


def test_the_table_of_runs_is_saved_and_a_note_is_no_formula(watched: Watched) -> None:
    watched.open("/")
    rows = {row[0]: row for row in csv.reader(io.StringIO(saved(watched, "section:has(.runs)", "CSV")))}
    assert {"run", "saved", "noted"} <= rows.keys()
    assert rows["noted"][-1] == "'=1+1, <b>bold</b>"


def test_a_chart_is_saved_as_a_picture(watched: Watched) -> None:
    watched.open("/run/saved/staleness")
    watched.page.locator("#staleness-over-time").hover()
    with watched.page.expect_download() as download:
        watched.page.locator("#staleness-over-time [data-title^='Download plot']").click()
    assert download.value.suggested_filename == "staleness-over-time.png"
    assert download.value.path().read_bytes().startswith(b"\x89PNG")


def test_keys_lead_to_views_and_are_listed_and_a_field_keeps_what_is_typed(watched: Watched) -> None:
    page = watched.page
    watched.open("/run/saved")
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_contain_text("all runs")
    page.keyboard.press("Escape")
    expect(page.locator("#keys")).to_be_hidden()
    page.keyboard.press("2")
    expect(page).to_have_title("Staleness · saved · Millrace")
    page.keyboard.press("r")
    expect(page).to_have_title("Runs · Millrace")
    page.keyboard.press("/")
    page.keyboard.type("r2")
    expect(page.locator("#runs-filter")).to_have_value("r2")
    watched.assert_quiet()


def test_a_late_update_leaves_the_field_that_is_typed_into(watched: Watched) -> None:
    page = watched.page
    page.add_init_script(_LATE_UPDATE)
    watched.open("/run/saved/staleness")
    page.evaluate("late.armed = true")
    page.keyboard.press("r")
    field = page.locator("#runs-filter")
    expect(field).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("r2")
    answered = page.evaluate("late.released = true, late.answered")
    page.wait_for_function(f"() => late.answered >= {answered} + 3")
    expect(field).to_have_value("r2")
    watched.assert_quiet()
