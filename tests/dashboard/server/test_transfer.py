"""Scripts are compressed, and a browser that has them does not load them again."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from plotly.offline import get_plotlyjs_version
from support.pages.sites import LOCAL, open_client, store_run

from dashboard.views.figures import PLOTLY_FILE

ZIPPED = {**LOCAL, "Accept-Encoding": "gzip, deflate, br"}
PLOTLY = "/_dash-component-suites/plotly/package_data/plotly.min.js"
MOST_FIRST, MOST_AFTER = 1_500_000, 100_000
"""Bytes of a page and its scripts: in a new browser, and in one with a filled cache."""


@pytest.fixture
def page(tmp_path: Path) -> FlaskClient:
    store_run(tmp_path, "one")
    return open_client(tmp_path)


def scripts(page: FlaskClient) -> Iterator[str]:
    """Addresses that a page loads: those in its text, and Plotly."""
    text = page.get("/run/one", headers=LOCAL).text
    for mark in ('src="', 'href="'):
        addresses = (part.split('"')[0] for part in text.split(mark)[1:])
        yield from (address for address in addresses if "favicon" not in address)
    yield PLOTLY


def test_a_script_is_compressed_for_a_browser_that_says_it_can_read_that(page: FlaskClient) -> None:
    plain, zipped = page.get(PLOTLY, headers=LOCAL), page.get(PLOTLY, headers=ZIPPED)
    assert "Content-Encoding" not in plain.headers
    assert zipped.headers["Content-Encoding"] == "gzip"
    assert plain.headers["Vary"] == zipped.headers["Vary"] == "Accept-Encoding"
    assert gzip.decompress(zipped.data) == plain.data
    assert int(zipped.headers["Content-Length"]) == len(zipped.data) < len(plain.data) / 3


def test_a_page_and_its_scripts_weigh_one_and_a_half_megabytes_at_first_and_little_after(page: FlaskClient) -> None:
    first = after = len(page.get("/run/one", headers=ZIPPED).data)
    for address in scripts(page):
        answer = page.get(address, headers=ZIPPED)
        first += len(answer.data)
        if "immutable" not in answer.headers["Cache-Control"]:
            again = page.get(address, headers={**ZIPPED, "If-None-Match": answer.headers["ETag"]})
            after += len(again.data)
    assert first <= MOST_FIRST
    assert after <= MOST_AFTER


def test_what_a_run_holds_is_compressed_and_never_kept(page: FlaskClient) -> None:
    metrics = page.get("/metrics", headers=ZIPPED)
    assert (metrics.headers["Content-Encoding"], metrics.headers["Cache-Control"]) == ("gzip", "no-store")
    assert gzip.decompress(metrics.data).startswith(b"# HELP")
    assert page.get("/", headers=ZIPPED).headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(("path", "loaded"), [("/run/one/flow", True), ("/", False)])
def test_plotly_is_loaded_at_once_on_pages_with_charts(page: FlaskClient, path: str, loaded: bool) -> None:
    assert (PLOTLY in page.get(path, headers=LOCAL).headers.get("Link", "")) == loaded


def test_the_small_plotly_has_the_version_of_the_package_plotly() -> None:
    assert f"plotly.js (cartesian - minified) v{get_plotlyjs_version()}\n" in PLOTLY_FILE.read_text()[:200]
