"""The Prefect UI as a person uses it: pages, labels and buttons in a headless Chromium."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class NoBrowser(Exception):
    """None of the browsers that this drives is installed."""


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser without a page. Raises NoBrowser."""
    result = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if result is None:
        raise NoBrowser(f"none of {', '.join(_BROWSERS)} is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=result)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def fresh_page(browser: Browser, width: int = 1280, height: int = 900) -> Iterator[Page]:
    """A page that shares no cookie, cache or storage with the browser's other pages."""
    with browser.new_context(viewport={"width": width, "height": height}) as context:
        page = context.new_page()
        page.set_default_timeout(60_000)
        expect.set_options(timeout=60_000)
        yield page


@contextmanager
def browser_page() -> Iterator[Page]:
    """A fresh page in a new browser. Raises NoBrowser."""
    with running_browser() as browser, fresh_page(browser) as page:
        yield page


def form_field(page: Page, *labels: str) -> Locator:
    """The field of a parameter, found by the labels of its sections and its own: `config`, `Training`, `Max Steps`."""
    at = page.locator("body")
    for label in labels:
        text = "normalize-space(.)"
        named = f"{text}='{label}' or {text}='{label} (Optional)'"
        at = at.locator(
            "xpath=.//div[contains(concat(' ', @class, ' '), ' schema-form-property ')]"
            f"[./div[contains(@class, 'p-label__header')]//span[contains(@class, '__label')][{named}]]"
        )
    return at


def fill(page: Page, value: object, *labels: str) -> None:
    field = form_field(page, *labels)
    field.first.wait_for()
    control = field.locator("input, textarea")
    if not control.count():
        # The field is null: choose its other type first.
        field.get_by_role("button", name=type(value).__name__, exact=True).click()
    control.fill(str(value))
