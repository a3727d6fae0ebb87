"""The table of docs/operations.md: faults of a deployed campaign, the time until noticed, the time until overcome.

`pytest -s` shows it as it is measured. The hosts' rows come from `test_hosts.py`.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.campaigns.campaigns import assert_balanced, healthy, stages_of, wait_until
from support.campaigns.deployed import Site, Terminal

from millrace.runs.status import StatusReader
from storage.stores.factory import open_store

pytestmark = [pytest.mark.campaign, pytest.mark.faults, pytest.mark.timeout(1500)]

NAME = "operated"
STEPS = 100_000
"""No test reaches this step."""
OUTAGE_SECONDS = 30.0


class Operated:
    """A campaign of a site, seen from outside."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.run_url = site.folder / "runs" / NAME
        self.flow_run = ""

    def begin(self, **settings: object) -> None:
        """A new attempt; returns once it trains."""
        before = self.steps()
        parameters = self.site.campaign(
            NAME, **{"training.max_steps": STEPS, "training.checkpoint_every": 10, **settings}
        )
        self.flow_run = self.site.start("campaign/campaign", parameters)
        wait_until(lambda: self.steps() > before, "the campaign to train", 240)

    def status_record(self, stage: str) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json.loads((self.run_url / "progress" / f"{stage}.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return record

    def steps(self) -> int:
        return int(self.status_record("train-0").get("policy_version", 0))

    def controller(self) -> psutil.Process:
        """The process of the flow run: every stage's parent."""
        (pid,) = {process.ppid() for process in stages_of(self.run_url)}
        return psutil.Process(pid)

    def check_ledger(self) -> None:
        assert_balanced(StatusReader(open_store(str(self.run_url))).look())

    def events(self, kind: str) -> int:
        body = {"filter": {"event": {"name": [f"millrace.{kind}"]}}}
        return int(self.site.api.post("/events/filter", json=body).json()["total"])


@pytest.fixture
def operated(tmp_path: Path) -> Operated:
    return Operated(Site(tmp_path))


def seconds_until(condition: Callable[[], bool], what: str, since: float) -> float:
    wait_until(condition, what, 180)
    return time.monotonic() - since


def print_row(what: str, noticed: float | None, overcome: float | None) -> None:
    cells = [f"{seconds:.1f} s" if seconds is not None else "–" for seconds in (noticed, overcome)]
    print(f"| {what} | {cells[0]} | {cells[1]} | 0 | exact |", flush=True)


def kill_stage(operated: Operated, stage: str) -> None:
    before, restarts = operated.status_record(stage), operated.events("stage.restarted")
    killed = time.monotonic()
    os.kill(before["pid"], signal.SIGKILL)
    noticed = seconds_until(
        lambda: operated.events("stage.restarted") > restarts, f"the report of {stage}'s restart", killed
    )
    overcome = seconds_until(
        lambda: (record := operated.status_record(stage))["pid"] != before["pid"] and record.get("t_ready") is not None,
        f"{stage} to be ready again",
        killed,
    )
    steps = operated.steps()
    wait_until(lambda: operated.steps() > steps + 1, "training to continue", 180)
    assert operated.site.state(operated.flow_run) == "Running"
    operated.check_ledger()
    print_row(f"kill -9 of {stage}", noticed, overcome)


def kill_controller(operated: Operated) -> None:
    controller = operated.controller()
    killed = time.monotonic()
    controller.kill()
    noticed = seconds_until(lambda: operated.site.state(operated.flow_run) == "Crashed", "the crash", killed)
    wait_until(lambda: stages_of(operated.run_url) == [], "every stage to end", 60)
    operated.check_ledger()
    operated.begin()
    print_row("kill -9 of the controller", noticed, time.monotonic() - killed)


def kill_server(operated: Operated, server: Terminal) -> Terminal:
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    steps = operated.steps()
    time.sleep(OUTAGE_SECONDS)
    assert operated.steps() > steps, "the campaign continues without a server"
    back = time.monotonic()
    server = operated.site.make("server")

    def caught_up() -> bool:
        try:
            bars = operated.site.api.post("/artifacts/latest/filter", json={}).json()
        except httpx.HTTPError:
            return False
        seen = [bar["data"] for bar in bars if bar["key"] == f"{NAME}-progress"]
        return bool(seen) and float(seen[0]) * STEPS / 100 > steps

    overcome = seconds_until(caught_up, "the UI to catch up", back)
    assert operated.site.state(operated.flow_run) == "Running"
    operated.check_ledger()
    print_row(f"kill -9 of the server, away for {OUTAGE_SECONDS:.0f} s", None, overcome)
    return server


def cancelled_after(operated: Operated) -> float:
    """Cancels as the UI does; how long it takes until the run is Cancelled and no stage is left."""
    started = time.monotonic()
    body = {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": False}
    operated.site.api.post(f"/flow_runs/{operated.flow_run}/set_state", json=body)
    noticed = seconds_until(lambda: operated.site.state(operated.flow_run) == "Cancelled", "the cancellation", started)
    assert stages_of(operated.run_url) == []
    operated.check_ledger()
    return noticed


def cancel(operated: Operated) -> None:
    started = time.monotonic()
    noticed = cancelled_after(operated)
    operated.begin()
    print_row("cancelled in the UI; its next attempt", noticed, time.monotonic() - started)


def terminate_worker(operated: Operated, worker: Terminal) -> Terminal:
    started = time.monotonic()
    os.kill(worker.child_pid(), signal.SIGTERM)
    worker.process.wait(timeout=120)
    noticed = time.monotonic() - started
    assert stages_of(operated.run_url) == []
    assert operated.site.state(operated.flow_run) == "Crashed"
    operated.check_ledger()
    worker = operated.site.make("deploy")
    operated.begin()
    print_row("SIGTERM of the worker; a new one, its next attempt", noticed, time.monotonic() - started)
    return worker


def kill_worker(operated: Operated, worker: Terminal) -> Terminal:
    os.kill(worker.child_pid(), signal.SIGKILL)
    worker.process.wait(timeout=60)
    steps = operated.steps()
    wait_until(lambda: operated.steps() > steps + 3, "the campaign to continue without its worker", 60)
    operated.check_ledger()
    print_row("kill -9 of the worker: its campaign goes on", None, 0.0)
    print_row("… and is cancelled in the UI without one", cancelled_after(operated), None)
    return operated.site.make("deploy")


def test_a_deployed_campaign_overcomes_every_kill_and_its_ledger_stays_exact(operated: Operated) -> None:
    site = operated.site
    server = site.make("server")
    worker: Terminal | None = None
    try:
        wait_until(lambda: healthy(f"{site.url}/api"), "the server to answer")
        worker = site.make("deploy")
        wait_until(lambda: b"started!" in worker.output.read_bytes(), "the worker to start")
        operated.begin()
        for stage in ("generate-0", "score-0", "train-0", "sync_weights-0"):
            kill_stage(operated, stage)
        kill_controller(operated)
        server = kill_server(operated, server)
        cancel(operated)
        worker = terminate_worker(operated, worker)
        worker = kill_worker(operated, worker)
        operated.begin(**{"budget.max_steps": 3})
        assert site.wait_until_over(operated.flow_run)["type"] == "COMPLETED"
        operated.check_ledger()
        assert stages_of(operated.run_url) == []
    finally:
        for terminal in (worker, server):
            if terminal is not None and terminal.process.poll() is None:
                terminal.stop()
