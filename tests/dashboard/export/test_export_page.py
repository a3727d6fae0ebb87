"""The exported file, opened in a headless Chromium from the disk, with every way off the machine shut."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import plotly.graph_objects as go
import pytest
from playwright.sync_api import Page
from support.pages.browser import NoBrowser, browser_page
from support.pages.run_data import run_data

from dashboard.export.page import export, page
from dashboard.read.model import RunData
from dashboard.views.blocks import Chart, Rows, Table, View
from millrace.errors import InputError

_EVIL = "</script><script>window.owned=1</script><img src=x onerror=window.owned=2>"
"""Markup that would run, at whichever place it got through."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Page]:
    try:
        with browser_page() as shown:
            # Nothing but files: what asks for anything else fails, and is noted.
            shown.context.set_offline(True)
            yield shown
    except NoBrowser as error:
        pytest.skip(str(error))


class _Opened:
    """A file in the browser, with its requests and complaints."""

    def __init__(self, chromium: Page, file: Path) -> None:
        self.page = chromium
        self.asked: list[str] = []
        self.complaints: list[str] = []
        chromium.on("request", lambda request: self.asked.append(request.url))
        chromium.on("console", lambda message: self.complaints.append(message.text))
        chromium.on("pageerror", lambda error: self.complaints.append(str(error)))
        chromium.goto(file.as_uri())


def _line(runs: Sequence[RunData]) -> go.Figure:
    lines = [
        go.Scatter(x=run.metrics["train-0"]["loss"]["policy_version"], y=run.metrics["train-0"]["loss"]["value"])
        for run in runs
    ]
    return go.Figure(lines)


def _tall(runs: Sequence[RunData]) -> go.Figure:
    return go.Figure(go.Heatmap(z=[[1, 2], [3, 4]]), layout={"height": 600})


def _view(*blocks: Chart | Table, title: str = "Learning", sentence: str = "Whether it learns.") -> View:
    return View(name="learning", title=title, sentence=sentence, blocks=blocks)


_LOSS = Chart(id="loss", title="Loss", sentence="The loss by policy version.", build=_line)
_HEAT = Chart(id="heat", title="Versions", sentence="Which of them met.", build=_tall, wide=True)
_BALANCE = Table(
    id="balance",
    title="Balance",
    sentence="Where all went.",
    build=lambda runs: Rows(header=("what", "rollouts"), rows=[("trained", "12")], verdict="good", note="It is right."),
)


@pytest.mark.slow
def test_every_chart_is_drawn_with_the_runs_numbers_and_nothing_is_asked_for(chromium: Page, tmp_path: Path) -> None:
    file = tmp_path / "mine.html"
    export([run_data()], [_view(_LOSS, _HEAT, _BALANCE)], file)
    opened = _Opened(chromium, file)
    shown = opened.page
    assert shown.locator(".js-plotly-plot .main-svg").first.is_visible()
    drawn = shown.evaluate("() => [...document.querySelectorAll('.js-plotly-plot')].map(gd => [gd.id, gd.data.length])")
    assert drawn == [["chart-loss", 1], ["chart-heat", 1]]
    # As Plotly reads them, from whichever form they travel in.
    points = shown.evaluate(
        "() => { const [trace] = document.getElementById('chart-loss').calcdata; return trace.map(p => [p.x, p.y]); }"
    )
    assert points == [[1, 0.5], [2, 0.25], [3, -0.125]]
    heights = shown.evaluate("() => [...document.querySelectorAll('.js-plotly-plot')].map(gd => gd.clientHeight)")
    assert heights[0] >= 380
    assert heights[1] >= 600
    assert shown.get_by_role("cell", name="12", exact=True).is_visible()
    assert shown.locator(".verdict.good").inner_text() == "good"
    for sentence in ("Whether it learns.", "The loss by policy version.", "Which of them met.", "Where all went."):
        assert shown.get_by_text(sentence, exact=True).is_visible()
    assert opened.asked == [file.as_uri()]
    assert opened.complaints == []


def test_the_header_says_which_run_how_far_it_was_and_what_could_not_be_read(chromium: Page, tmp_path: Path) -> None:
    file = tmp_path / "mine.html"
    unread = run_data(problems=("streams/consumed: record 3 is damaged",))
    export([unread, run_data("other", status=None)], [_view(_LOSS, _BALANCE)], file)
    opened = _Opened(chromium, file)
    header = opened.page.locator("header")
    for expected in ("mine", "running", "3 of 10", "2023-11-14 22:13:20 UTC", "/runs/mine", "other"):
        assert expected in header.inner_text()
    assert "record 3 is damaged" in header.locator(".problems").inner_text()
    assert opened.page.evaluate("() => document.getElementById('chart-loss').data.length") == 2
    assert opened.complaints == []


def test_markup_from_a_store_is_shown_as_text_and_never_runs(chromium: Page, tmp_path: Path) -> None:
    def evil_figure(runs: Sequence[RunData]) -> go.Figure:
        figure = go.Figure(go.Scatter(x=[1, 2], y=[1, 2], name=_EVIL, text=[_EVIL, _EVIL]))
        return figure.update_layout(title=_EVIL, showlegend=True).add_annotation(text=_EVIL, x=1, y=1)

    cells = Rows(header=(_EVIL,), rows=[(_EVIL,)], note=_EVIL, verdict="bad")
    view = _view(
        Chart(id="evil", title=_EVIL, sentence=_EVIL, build=evil_figure),
        Table(id="cells", title=_EVIL, sentence=_EVIL, build=lambda runs: cells),
        title=_EVIL,
        sentence=_EVIL,
    )
    file = tmp_path / "evil.html"
    export([run_data(_EVIL, problems=(_EVIL,))], [view], file)
    opened = _Opened(chromium, file)
    shown = opened.page
    assert shown.locator("td", has_text=_EVIL).count() >= 1
    assert shown.locator(".js-plotly-plot .main-svg").first.is_visible()
    shown.locator("#chart-evil .drag").first.hover()
    assert shown.evaluate("() => window.owned") is None
    assert shown.locator("img[onerror]").count() == 0
    assert opened.asked == [file.as_uri()]
    assert opened.complaints == []


def test_a_script_that_got_into_the_file_all_the_same_would_be_refused_by_its_policy(
    chromium: Page, tmp_path: Path
) -> None:
    whole = page([run_data()], [_view(_LOSS)], datetime.now(UTC))
    outside = "http://127.0.0.1:9/picture"
    smuggled = f"<script>window.owned=1</script><img src='{outside}' onerror='window.owned=2'></body>"
    file = tmp_path / "smuggled.html"
    file.write_text(whole.replace("</body>", smuggled))
    opened = _Opened(chromium, file)
    assert opened.page.evaluate("() => window.owned") is None
    # The witness: the browser says that it refused the script.
    refused = [text for text in opened.complaints if "Content Security Policy" in text]
    assert len(refused) >= 2, opened.complaints
    assert opened.page.locator(".js-plotly-plot .main-svg").first.is_visible()


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_it_is_light_or_dark_as_the_reader_likes(chromium: Page, tmp_path: Path, scheme: str, dark: bool) -> None:
    file = tmp_path / "mine.html"
    export([run_data()], [_view(_LOSS)], file)
    chromium.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    shown = _Opened(chromium, file).page
    colour = "e => getComputedStyle(e).{}.match(/[0-9]+/g).slice(0, 3).map(Number)"
    ground = shown.locator("body").evaluate(colour.format("backgroundColor"))
    # Plotly's own text follows.
    text = shown.locator("#chart-loss .xtick text").first.evaluate(colour.format("fill"))
    assert (sum(ground) < sum(text)) == dark, f"ground {ground}, text {text}"


def test_a_file_that_is_there_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.html"
    file.write_text("old")
    export([run_data()], [_view(_BALANCE)], file)
    assert file.read_text().startswith("<!DOCTYPE html>")
    assert list(tmp_path.iterdir()) == [file]


def test_a_place_that_cant_be_written_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    for place in (tmp_path / "missing" / "mine.html", tmp_path):
        with pytest.raises(InputError):
            export([run_data()], [_view(_BALANCE)], place)
    assert list(tmp_path.iterdir()) == []
