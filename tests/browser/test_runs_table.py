"""The table of all runs and their comparison as a person uses them, with text in them that would like to be markup."""

import json
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect
from support.pages.dashboard_page import Watched
from support.stored_run.run import Shape, StoredRun, make_run

from millrace.runs.note import write_note
from storage import layout
from storage.stores.local import LocalStore

pytestmark = pytest.mark.browser

EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
RATES = {"slow": 1e-05, "middle": 3e-05, "fast": 1e-04}


def configured(run: StoredRun, **training: object) -> None:
    """Changes the stored config."""
    record = json.loads(bytes(run.store.get(layout.RUN)))
    record["config"]["training"] |= training
    run.store.put(layout.RUN, json.dumps(record).encode())


@pytest.fixture(scope="module", autouse=True)
def runs(root: Path) -> None:
    for number, (name, rate) in enumerate(RATES.items()):
        run = make_run(LocalStore(root / name, fsync=False), name, Shape(steps=80, seed=number, steps_per_part=20))
        configured(run, learning_rate=rate)
        run.evaluate(0.25 * number)
        run.finish()
    evil = StoredRun(LocalStore(root / "evil", fsync=False), "evil", Shape(steps=80))
    configured(evil, learning_rate=EVIL, **{EVIL: EVIL})
    write_note(evil.store, EVIL)
    evil.append(2)


def names(page: Page) -> list[str]:
    return page.locator("table.runs tbody tr td:nth-child(2)").all_inner_texts()


def type_into(page: Page, label: str, text: str) -> None:
    field = page.get_by_label(label)
    field.fill(text)
    field.press("Enter")


@pytest.mark.extended
def test_runs_are_filtered_sorted_given_columns_and_compared(watched: Watched) -> None:
    page = watched.page
    watched.open("/")
    assert sorted(names(page)) == ["evil", "fast", "middle", "slow"]

    page.get_by_title("add the column training.learning_rate").click()
    expect(page.locator("table.runs th", has_text="training.learning_rate")).to_be_visible()
    type_into(page, "add a column", "training.max_steps")
    expect(page.locator("table.runs th", has_text="training.max_steps")).to_be_visible()

    type_into(page, "filter", "training.learning_rate>=1e-5 state=finished")
    expect(page.locator("table.runs tbody tr")).to_have_count(3)
    page.get_by_title("sort by training.learning_rate").click()
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("training.learning_rate")
    assert names(page) == ["fast", "middle", "slow"]
    rates = page.locator("table.runs tbody tr td.number", has_text="e-05")
    expect(rates).to_have_count(2)
    expect(rates.first).to_have_css("text-align", "right")
    # The line of each run, as soon as it is read.
    expect(page.locator("table.runs img.sparkline")).to_have_count(3)

    shared = page.url
    page.get_by_title("compare slow", exact=True).click()
    expect(page.get_by_title("do not compare slow", exact=True)).to_be_visible()
    # By keyboard, which goes on from where it was.
    page.get_by_title("compare fast", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.get_by_title("do not compare fast", exact=True)).to_be_focused()
    told = parse_qs(urlsplit(page.url).query)
    assert told["runs"] == ["slow,fast"]
    assert told["column"] == ["training.learning_rate", "training.max_steps"]

    page.get_by_role("link", name="Compare 2 runs").click()
    expect(page.locator("#compare-config tbody tr")).to_have_count(1)
    assert watched.rows("compare-config") == [["training.learning_rate", "1e-05", "0.0001"]]
    accuracy = next(row for row in watched.rows("compare-figures") if row[0] == "held-out accuracy, newest")
    assert accuracy[1:] == ["0.000 (v80)", "0.500 (v80)"]
    figure = watched.figure("compare-reward-mean")
    assert [trace.get("fill") for trace in figure] == ["toself", "toself", None, None]
    chart = page.locator("#compare-reward-mean .js-plotly-plot")
    chart.locator(".legendtoggle").first.click()
    hidden = "graph => graph._fullData.filter(trace => trace.visible === 'legendonly').map(trace => trace.legendgroup)"
    expect(chart.locator(".legend .traces").first).to_have_css("opacity", "0.5")
    assert chart.evaluate(hidden) == ["slow", "slow"]

    page.goto(shared)
    page.wait_for_selector("table.runs")
    assert names(page) == ["fast", "middle", "slow"]
    expect(page.get_by_label("filter")).to_have_value("training.learning_rate>=1e-5 state=finished")
    watched.assert_quiet()


def test_names_settings_and_notes_are_text_and_never_markup(watched: Watched) -> None:
    page = watched.page
    for path in (f"/?column=training.learning_rate&column={EVIL}&filter={EVIL.split()[0]}", "/compare?runs=evil,slow"):
        watched.open(path)
        expect(page.locator("#page")).to_contain_text(EVIL)
        assert page.evaluate("window.hacked === undefined")
        assert page.locator("img[src=x]").count() == 0
    watched.assert_quiet()


def test_a_filter_that_no_run_matches_says_so_and_leads_back(watched: Watched) -> None:
    page = watched.page
    watched.open(f"/?filter={EVIL}0")
    expect(page.locator(".nowhere")).to_contain_text("No run matches")
    assert page.evaluate("window.hacked === undefined")
    page.get_by_role("link", name="Show all runs").click()
    expect(page.locator("table.runs tbody tr")).to_have_count(4)
