"""Takes the pictures of the documentation: `make pictures`, which needs Chromium.

    Prefect server, worker ─► deployments, form ─► two campaigns ─► flow run ─┐
    dashboard ─► table of runs, home, a group ────────────────────────────────┴─► docs/images/*.png

The campaigns are those of `tiny-cpu` with other seeds, and shorter. Five minutes on two cores.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page
from support.campaigns.campaigns import wait_until
from support.campaigns.deployed import Site
from support.pages.browser import fresh_page, running_browser
from support.pages.dashboard_page import served

from storage.progress import read_status
from storage.stores.factory import open_store

IMAGES = Path(__file__).parent / "images"
DEPLOYMENT = "campaign-from-preset/campaign-from-preset"
SEEDS = (0, 1)
STEPS = 60
SHOWN_STEP = 40
"""The step of the first campaign at which its flow run is shown."""
GROUP = 1000
HEIGHT = 900
_SETTLED_SECONDS = 4
"""Prefect's pages do not say when they are complete."""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="millrace-pictures-") as folder, running_browser() as browser:
        site = Site(Path(folder))
        with site.server(), site.worker(), fresh_page(browser, height=HEIGHT) as page:
            _take(page, "deployments", f"{site.url}/deployments")
            _take(page, "form", f"{site.url}/deployments/deployment/{site.deployment(DEPLOYMENT)['id']}/run")
            for flow_run in _campaigns(site):
                _take(page, "campaign", f"{site.url}/runs/flow-run/{flow_run}")
        with served(site.folder / "runs") as address, fresh_page(browser, height=HEIGHT) as page:
            _take(page, "dashboard-runs", address)
            _take(page, "dashboard-home", f"{address}/run/{_name(0)}")
            _take(page, "dashboard-trajectories", f"{address}/run/{_name(0)}/trajectories?group={GROUP}")


def _campaigns(site: Site) -> Iterator[str]:
    """Runs a campaign per seed, one after the other; yields the flow run of the first one while it trains."""
    first, *others = [_start(site, seed) for seed in SEEDS]
    store = open_store(str(site.folder / "runs" / _name(SEEDS[0])))
    wait_until(lambda: read_status(store, "train", 0).get("policy_version", 0) >= SHOWN_STEP, "training", 900)
    yield first
    for flow_run in (first, *others):
        state = site.wait_until_over(flow_run, 900)
        assert state["type"] == "COMPLETED", state


def _start(site: Site, seed: int) -> str:
    """The worker runs one campaign at a time."""
    advanced = [f"seed={seed}", f"storage.root={site.folder / 'runs'}", "training.checkpoint_every=20"]
    return site.start(DEPLOYMENT, {"name": _name(seed), "max_steps": STEPS, "advanced": advanced})


def _name(seed: int) -> str:
    return f"seed-{seed}"


def _take(page: Page, name: str, url: str) -> None:
    page.goto(url)
    time.sleep(_SETTLED_SECONDS)
    page.screenshot(path=IMAGES / f"{name}.png")
    print(f"{IMAGES / name}.png", flush=True)


if __name__ == "__main__":
    main()
