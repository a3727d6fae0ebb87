"""The load of a dashboard on the campaign it shows: alone, with a dashboard, and with an open page.

    alone     campaign
    served    campaign ◄── dashboard ◄── each second, what a page posts                   a client on another machine
    watched   campaign ◄── dashboard ◄── a page, open in a headless Chromium              one on this machine

The order of the campaigns alternates between rounds. What a page posts each second is recorded once, from a real page.
"""

import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, Request, sync_playwright

from benchmarks.async_vs_sync import run_campaign
from benchmarks.timing import median_ratio
from storage import layout

CONTENDERS = ("alone", "served", "watched")
_RUN = "live"
_PATH = f"/run/{_RUN}/staleness"
_POLL_SECONDS = 1.0
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True, kw_only=True)
class Posted:
    """What an open page posts each second."""

    path: str
    body: bytes


def measure_live(folder: Path, *, steps: int, warmup: int, rounds: int) -> dict[str, Any]:
    """Seconds per optimizer step of each contender, by round, and the median of the ratios to `alone` within a round.

    `steps` are those of each campaign, the first `warmup` of which are not timed. Writes below `folder`.
    """
    first = folder / "first"
    run_campaign(first / _RUN, [f"storage.root={first}", f"training.max_steps={warmup}"], 0)
    settings = [f"model.path={first / _RUN / layout.START_MODEL}", f"training.max_steps={steps}"]
    with serving(first) as address:
        posted = post_of_page(address)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    answers: dict[str, list[int]] = {name: [] for name in CONTENDERS}
    for turn in range(rounds):
        for name in CONTENDERS[turn % len(CONTENDERS) :] + CONTENDERS[: turn % len(CONTENDERS)]:
            root = folder / f"{turn}-{name}"
            with looked_at(name, root, posted) as answered:
                run = run_campaign(root / _RUN, [f"storage.root={root}", *settings], warmup)
            seconds[name].append(run["seconds_per_step"])
            answers[name].append(answered())
            shutil.rmtree(root)
    return {
        "steps": steps,
        "rounds": rounds,
        "seconds_per_step": seconds,
        "answers": answers,
        "ratio": {name: median_ratio(seconds[name], seconds["alone"]) for name in CONTENDERS[1:]},
    }


@contextmanager
def looked_at(name: str, root: Path, posted: Posted) -> Iterator[Callable[[], int]]:
    """Inside the block, the runs below `root` are watched in the way `name`; yields the number of answers so far."""
    over = threading.Event()
    answered: list[int] = []
    if name == "alone":
        yield lambda: 0
        return
    look = _poll if name == "served" else _watch
    with serving(root) as address, ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look, address, root, posted, over, answered)
        try:
            yield lambda: len(answered)
        finally:
            over.set()
        looking.result()


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """A `millrace dashboard` of the runs below `root`, as users start it; yields its address."""
    root.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "flows.cli.main", "dashboard", str(root), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+/", line)
        if found is None:
            raise RuntimeError(f"the dashboard printed {line!r}; expected its address")
        yield found[0].rstrip("/")
    finally:
        process.terminate()
        process.wait()


def _poll(address: str, root: Path, posted: Posted, over: threading.Event, answered: list[int]) -> None:
    headers = {"Content-Type": "application/json"}
    while not over.wait(_POLL_SECONDS):
        request = urllib.request.Request(address + posted.path, posted.body, headers)
        with urllib.request.urlopen(request) as answer:
            answer.read()
            answered.append(answer.status)


def _watch(address: str, root: Path, posted: Posted, over: threading.Event, answered: list[int]) -> None:
    with _page() as page:
        page.on("response", lambda response: answered.append(response.status) if _is_tick(response.request) else None)
        while not (root / _RUN / layout.RUN).exists() and not over.is_set():
            page.wait_for_timeout(100)
        page.goto(address + _PATH)
        while not over.is_set():
            page.wait_for_timeout(100)


def post_of_page(address: str) -> Posted:
    """What the page of the run `live` posts, by a real one in a headless Chromium."""
    with _page() as page:
        page.goto(address + _PATH)
        page.wait_for_selector(".js-plotly-plot")
        with page.expect_request(_is_tick) as found:
            pass
        request = found.value
        body = json.loads(request.post_data or "")
        # As if drawn from nothing, so that each answer has every figure, as in a run in progress.
        for state in body["state"]:
            if state["id"] == "shown":
                state["value"]["seen"] = []
        return Posted(path=request.url.removeprefix(address), body=json.dumps(body).encode())


def _is_tick(request: Request) -> bool:
    if "/_dash-update-component" not in request.url:
        return False
    return any(given.get("id") == "tick" for given in json.loads(request.post_data or "{}").get("inputs", ()))


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A headless Chromium without a page. Raises RuntimeError if none is installed."""
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        raise RuntimeError(f"a page needs a browser; none of {', '.join(_BROWSERS)} is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def _page() -> Iterator[Page]:
    with running_browser() as browser:
        yield browser.new_page(viewport={"width": 1280, "height": 800})
