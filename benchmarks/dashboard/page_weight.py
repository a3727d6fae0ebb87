"""What a run's home page weighs over the wire, and how soon its first chart is there, in a headless Chromium.

    5 stored runs ─► `millrace dashboard` ─► each run's home page, in a fresh browser ─► again, in the same browser
                                             ├─ as served      the browser takes gzip and keeps what it may
                                             └─ plain          it refuses gzip and keeps nothing

Each contender has a server of its own, so every first load is also the server's first look at that run. Weights are
those of all responses with their headers, until the first chart is there and nothing is under way; times are from the
start of the navigation. Medians over runs and rounds.

    python -m benchmarks.dashboard.page_weight [--runs 5] [--steps 400] [--rounds 3] [--json PATH]
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext
from rich.console import Console

from benchmarks.dashboard.live import running_browser, serving
from benchmarks.report import machine, make_parser, make_table, print_targets, write_json
from benchmarks.stored_run.run import Shape, make_run
from storage.stores.factory import open_store

CONTENDERS = ("as served", "plain")
TARGETS = {"first_bytes": 2_000_000, "again_bytes": 100_000, "first_chart_seconds": 1.0}
"""Of the page as served: bytes of the first and the second load, seconds until the first chart of the first."""
_NOTE_FIRST_CHART = """
(() => {
  const look = () => {
    if (document.querySelector('.js-plotly-plot .main-svg')) window.firstChart = performance.now();
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})();
"""
"""Run in each page: when the first chart was first drawn, milliseconds since the navigation began."""


def main() -> None:
    """Measures, prints a table and writes the figures as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="stored runs")
    parser.add_argument("--steps", type=int, default=400, help="policy versions of each run")
    parser.add_argument("--rounds", type=int, default=3, help="how often each page is loaded")
    arguments = parser.parse_args()
    if min(arguments.runs, arguments.steps, arguments.rounds) < 1:
        parser.error("expected at least one run, one step and one round")
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as temporary:
        result = measure(Path(temporary), arguments.runs, arguments.steps, arguments.rounds)
    result = {"machine": machine(), **result, "targets": targets_met(result)}
    _print(result)
    write_json(arguments.json, result)


def measure(folder: Path, runs: int, steps: int, rounds: int) -> dict[str, Any]:
    """The medians of each contender by load, `first` or `again`: `bytes` and `first_chart_seconds`."""
    names = [f"run-{number}" for number in range(runs)]
    for number, name in enumerate(names):
        make_run(open_store(str(folder / name)), name, Shape(steps=steps, seed=number))
    loads: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in CONTENDERS}
    with running_browser() as browser:
        # One page, so that no contender pays for the start of the browser.
        browser.new_page().close()
        for turn in range(rounds):
            for contender in CONTENDERS[turn % 2 :] + CONTENDERS[: turn % 2]:
                with serving(folder) as address:
                    loads[contender] += [_loads(browser, contender, f"{address}/run/{name}") for name in names]
    found = {name: _medians(some) for name, some in loads.items()}
    return {"runs": runs, "steps": steps, "rounds": rounds, "loads": found}


def targets_met(result: dict[str, Any]) -> dict[str, bool]:
    """Which of `TARGETS` the page as served reaches."""
    served = result["loads"]["as served"]
    found = {
        "first_bytes": served["first"]["bytes"],
        "again_bytes": served["again"]["bytes"],
        "first_chart_seconds": served["first"]["first_chart_seconds"],
    }
    return {f"{name} ≤ {most:,}": found[name] <= most for name, most in TARGETS.items()}


def _loads(browser: Browser, contender: str, address: str) -> dict[str, dict[str, float]]:
    headers = {"Accept-Encoding": "identity"} if contender == "plain" else {}
    with browser.new_context(viewport={"width": 1280, "height": 800}, extra_http_headers=headers) as context:
        return {load: _load(context, address, keeps=contender != "plain") for load in ("first", "again")}


def _load(context: BrowserContext, address: str, *, keeps: bool) -> dict[str, float]:
    page = context.new_page()
    page.add_init_script(_NOTE_FIRST_CHART)
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    session.send("Network.setCacheDisabled", {"cacheDisabled": not keeps})
    weights: list[float] = []
    session.on("Network.loadingFinished", lambda event: weights.append(event["encodedDataLength"]))
    page.goto(address)
    page.wait_for_function("() => window.firstChart !== undefined")
    page.wait_for_load_state("networkidle")
    seconds = page.evaluate("window.firstChart") / 1000
    page.close()
    return {"bytes": sum(weights), "first_chart_seconds": seconds}


def _medians(loads: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        load: {name: statistics.median(one[load][name] for one in loads) for name in values}
        for load, values in loads[0].items()
    }


def _print(result: dict[str, Any]) -> None:
    console = Console()
    title = f"A run's home page; {result['runs']} runs × {result['steps']} versions"
    table = make_table(title, ("", "first load, kB", "again, kB", "first chart, s", "again, s"))
    for name, loads in result["loads"].items():
        weights = [f"{loads[load]['bytes'] / 1000:,.0f}" for load in ("first", "again")]
        seconds = [f"{loads[load]['first_chart_seconds']:.2f}" for load in ("first", "again")]
        table.add_row(name, *weights, *seconds)
    console.print(table)
    print_targets(console, result["targets"])


if __name__ == "__main__":
    main()
