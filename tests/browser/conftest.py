"""A served root of runs that the tests of this folder share, and a browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page
from support.pages.browser import NoBrowser, fresh_page, running_browser
from support.pages.dashboard_page import Watched, served


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs; each test makes runs with different names."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    with served(root) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        with running_browser() as browser:
            yield browser
    except NoBrowser as error:
        pytest.skip(str(error))


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with fresh_page(browser, height=800) as page:
        yield page


@pytest.fixture
def watched(page: Page, address: str) -> Watched:
    return Watched(page, address)
