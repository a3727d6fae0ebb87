"""The dashboard as a person has it: the real command, and its pages in a watching browser."""

import base64
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import numpy as np
from playwright.sync_api import Page
from support.campaigns.campaigns import BASE_INSTALL, REPOSITORY

_NUMPY = {"f4": "<f4", "f8": "<f8", "i1": "<i1", "i2": "<i2", "i4": "<i4", "u1": "<u1", "u2": "<u2", "u4": "<u4"}
_FIGURE = "id => document.getElementById(id).querySelector('.js-plotly-plot').data"

_UNFOLD = "() => document.querySelectorAll('details.more').forEach(details => { details.open = true; })"
_ALL_DRAWN = "() => [...document.querySelectorAll('.dash-graph')].every(graph => graph.querySelector('.main-svg'))"


@contextmanager
def served_process(
    root: Path, port: int, *arguments: str, errors: IO[str] | None = None
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`millrace dashboard ROOT`: its address, without a slash at the end, and its process. `errors` gets its stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.cli.main", "dashboard", str(root), "--port", str(port), *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **BASE_INSTALL},
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://[^ ]*:\d+", line)
        assert address, f"the dashboard did not start: {line!r}"
        yield address[0], process
    finally:
        process.terminate()
        process.communicate(timeout=30)


@contextmanager
def served(root: Path, *arguments: str, errors: IO[str] | None = None) -> Iterator[str]:
    """`millrace dashboard ROOT` on a free port: its address."""
    with served_process(root, 0, *arguments, errors=errors) as (address, _):
        yield address


class Watched:
    """A page with a record of its requests, errors and console messages."""

    def __init__(self, page: Page, base: str) -> None:
        self.page = page
        self.base = base
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, path: str) -> None:
        """Goes to a page, unfolds it, and waits until all of it is drawn."""
        self.page.goto(self.base + path)
        self.page.wait_for_selector("#page > *")
        self.unfold()
        self.wait_until_drawn()

    def unfold(self) -> None:
        """Opens the part of a view that holds the less important charts."""
        self.page.evaluate(_UNFOLD)

    def wait_until_drawn(self) -> None:
        self.page.wait_for_function(_ALL_DRAWN)

    def figure(self, block: str) -> list[dict[str, Any]]:
        """The traces that Plotly draws in a block, their numbers as lists."""
        self.page.wait_for_selector(f"#{block}", state="attached")
        self.unfold()
        self.page.wait_for_selector(f"#{block} .js-plotly-plot .main-svg")
        return plain(self.page.evaluate(_FIGURE, block))

    def newest_version(self) -> float:
        """The newest policy version that the chart of staleness reaches to."""
        newest: float = self.figure("staleness-over-time")[0]["x"][-1]
        return newest

    def rows(self, block: str) -> list[list[str]]:
        """The cells of a block's table, without its head."""
        lines = self.page.locator(f"#{block} tbody tr").all()
        return [line.locator("td").all_inner_texts() for line in lines]

    def assert_quiet(self) -> None:
        """Checks that nothing went wrong in the browser, and that no request left the machine."""
        assert self.complaints == [], self.complaints
        remote = [url for url in self.requests if urlsplit(url).scheme not in ("data", "blob")]
        assert remote, "the page requested nothing at all"
        assert {urlsplit(url).hostname for url in remote} == {"127.0.0.1"}


def plain(figure: Any) -> Any:
    """Plotly's JSON with each array as a list, however it was packed; NaN and infinity are None."""
    if isinstance(figure, dict):
        if "bdata" in figure:
            values = np.frombuffer(base64.b64decode(figure["bdata"]), _NUMPY[figure["dtype"]])
            shape = [int(length) for length in str(figure.get("shape", len(values))).split(",")]
            return plain(values.reshape(shape).tolist())
        return {name: plain(value) for name, value in figure.items()}
    if isinstance(figure, list):
        return [plain(value) for value in figure]
    return None if isinstance(figure, float) and not np.isfinite(figure) else figure
