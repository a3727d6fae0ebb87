"""Campaigns from the Prefect UI: `make server`, `make deploy`, the form in a real browser, what waits, what drains."""

import json
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, TimeoutError, expect
from support.campaigns.campaigns import QUICK, assert_balanced, quick, stages_of, start_model, wait_until
from support.campaigns.deployed import Site, Terminal
from support.pages.browser import NoBrowser, browser_page, fill

from millrace.evaluation.promotion import Promotion, PromotionDecision, read_decision
from millrace.runs.record import read_attempt
from millrace.runs.status import StatusReader
from storage import layout
from storage.checkpoints import CheckpointWriter
from storage.stores.factory import open_store

pytestmark = pytest.mark.campaign

LONG = 5000
"""Optimizer steps that no test reaches."""
STEPS_OF_AN_ATTEMPT = 200
"""Optimizer steps of an attempt, more than are made until it is suspended."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server that the tests of this file share."""
    site = Site(tmp_path_factory.mktemp("site"))
    with site.server():
        yield site


@pytest.fixture(scope="module")
def worker(site: Site) -> Iterator[Terminal]:
    with site.worker("CAMPAIGNS=2") as terminal:
        yield terminal


@pytest.fixture
def page() -> Iterator[Page]:
    try:
        with browser_page() as page:
            yield page
    except NoBrowser as error:
        pytest.skip(str(error))


def wait_for_training(site: Site, name: str) -> None:
    wait_until((site.folder / "runs" / name / "progress" / "train-0.json").exists, f"{name} to train")


def balanced_status(run_url: Path) -> dict[str, Any]:
    status = StatusReader(open_store(str(run_url))).look()
    assert_balanced(status)
    return status


def task_states(site: Site, flow_run: str) -> dict[str, str]:
    """The state of each task of a flow run, by name."""
    tasks = site.api.post("/task_runs/filter", json={"flow_runs": {"id": {"any_": [flow_run]}}}).json()
    return {task["name"]: task["state"]["name"] for task in tasks}


def press(page: Page, url: str, button: str) -> None:
    """Presses a button of a flow run's page, and the one of the dialog that asks again."""
    page.goto(url)
    page.get_by_role("button", name=button, exact=True).click()
    page.get_by_role("button", name="Submit", exact=True).click()


def submit(page: Page) -> None:
    """Presses the form's button until the server takes the campaign: while its SQLite is locked it says 503."""

    def is_taken() -> bool:
        with suppress(TimeoutError), page.expect_response("**/create_flow_run", timeout=20_000) as answer:
            page.get_by_role("button", name="Submit").click()
            return answer.value.ok
        return False

    wait_until(is_taken, "the server to take the form", every=1)


def test_a_campaign_started_from_the_form_completes_and_a_wrong_value_starts_none(
    site: Site, worker: Terminal, page: Page
) -> None:
    page.goto(f"{site.url}/deployments")
    page.get_by_role("link", name="campaign").first.click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    settings = {**QUICK, "name": "from-the-form", "storage.root": site.folder / "runs"}
    # Two threads crawl where other tests are at work.
    for key, value in settings.items():
        fill(page, value, "config", *(word.replace("_", " ").title() for word in key.split(".")))

    fill(page, 0, "config", "Training", "Max Steps")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_text("'config.training.max_steps'").first).to_contain_text("0 is less than the minimum of 1")
    assert site.flow_runs("campaign/campaign") == []

    fill(page, QUICK["training.max_steps"], "config", "Training", "Max Steps")
    submit(page)
    (run,) = site.flow_runs("campaign/campaign")
    assert site.wait_until_over(run["id"])["type"] == "COMPLETED", site.flow_run(run["id"])["state"]
    assert (site.folder / "runs" / "from-the-form" / "summary.json").exists()

    evaluated = site.start("evaluate/evaluate", {"run_url": str(site.folder / "runs" / "from-the-form")})
    cleaned = site.start("gc/gc", {"run_url": str(site.folder / "runs" / "from-the-form")})
    assert [site.wait_until_over(run)["type"] for run in (evaluated, cleaned)] == ["COMPLETED"] * 2


def test_a_chain_ends_where_nothing_is_promoted_and_goes_on_from_what_is(site: Site, worker: Terminal) -> None:
    root = site.folder / "runs"
    settings = [f"{key}={json.dumps(value)}" for key, value in {**quick(), "storage.root": str(root)}.items()]
    second = [setting for setting in settings if not setting.startswith("model.path")]
    links = [
        {"preset": "tiny-cpu", "settings": ["name=one", *settings]},
        {"preset": "tiny-cpu", "settings": ["name=two", *second]},
    ]
    run = site.start("chain/chain", {"links": links})
    assert site.wait_until_over(run)["type"] == "FAILED"
    assert balanced_status(root / "one")["state"] == "finished"
    assert not (root / "two").exists()

    files = {file.name: file.read_bytes() for file in start_model().iterdir()}
    decision = PromotionDecision(promoted=True, policy_version=6, accuracy=None, sentence="by hand", bar=None)
    promotion = Promotion(decision=decision, evaluation={}, incarnation=0, attempt=0)
    CheckpointWriter(open_store(str(root / "one")), layout.PROMOTED).commit(6, files, asdict(promotion))
    run = site.start("chain/chain", {"links": links})
    assert site.wait_until_over(run)["type"] == "COMPLETED", site.flow_run(run)["state"]
    model = Path(read_attempt(open_store(str(root / "two")), 0).config["model"]["path"])
    assert {file.name: file.read_bytes() for file in model.iterdir()} == files
    assert balanced_status(root / "two")["state"] == "finished"


def test_a_typo_in_the_form_fails_with_one_line_and_no_traceback(site: Site, worker: Terminal) -> None:
    run = site.start("campaign-from-preset/campaign-from-preset", {"advanced": ["training.max_step=5"]})
    state = site.wait_until_over(run)
    line = "the form: training.max_step is an unknown key; expected training.max_steps"
    assert (state["type"], state["message"]) == ("FAILED", line)

    def errors() -> list[str]:
        logs = site.api.post("/logs/filter", json={"logs": {"flow_run_id": {"any_": [run]}}}).json()
        return [log["message"] for log in logs if log["level"] >= logging.ERROR]

    # Prefect sends the logs of a flow run after its state.
    wait_until(errors, "the error to be logged", 60)
    assert errors() == [line]


@pytest.mark.extended
def test_a_campaign_suspended_during_its_last_evaluation_drains_without_a_failed_task(
    site: Site, worker: Terminal
) -> None:
    run_url = site.folder / "runs" / "measured"
    # Sampling takes far longer than the test.
    settings = {"prompts.num_eval": 4000, "evaluation.samples": 512, "evaluation.every": None}
    run = site.start("campaign/campaign", site.campaign("measured", **settings))
    wait_until(lambda: task_states(site, run).get("evaluate-1") == "Running", "the last evaluation", 240)
    suspended = {"type": "PAUSED", "name": "Suspended", "state_details": {"pause_reschedule": True}}
    site.api.post(f"/flow_runs/{run}/set_state", json={"state": suspended})
    wait_until((run_url / "attempts" / "0000.ended").exists, "the attempt to end", 60)
    wait_until(lambda: set(task_states(site, run).values()) == {"Completed"}, "every task to complete", 60)
    assert site.state(run) == "Suspended"
    assert stages_of(run_url) == []


@pytest.mark.extended
def test_a_second_attempt_waits_and_a_cancelled_one_drains_and_can_be_continued(
    site: Site, worker: Terminal, page: Page
) -> None:
    parameters = site.campaign("crowded", **{"training.max_steps": LONG})
    first = site.start("campaign/campaign", parameters)
    wait_for_training(site, "crowded")
    second = site.start("campaign/campaign", parameters)
    wait_until(lambda: site.state(second) == "AwaitingConcurrencySlot", "the second attempt to wait")
    site.api.delete(f"/flow_runs/{second}")
    assert site.state(first) == "Running"

    page.goto(f"{site.url}/runs/flow-run/{first}")
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Confirm").click()
    assert site.wait_until_over(first, 60)["type"] == "CANCELLED"
    run_url = site.folder / "runs" / "crowded"
    wait_until(lambda: stages_of(run_url) == [], "every stage to end", 30)
    cancelled = balanced_status(run_url)
    assert read_decision(open_store(str(run_url)), attempt=0) is None

    shorter = {"training.max_steps": LONG, "budget.max_steps": 2, "promotion.margin": 0.0}
    third = site.start("campaign/campaign", site.campaign("crowded", **shorter))
    assert site.wait_until_over(third)["type"] == "COMPLETED"
    assert balanced_status(run_url)["steps"] == cancelled["steps"] + 2
    assert read_decision(open_store(str(run_url)), attempt=1) is not None


@pytest.mark.extended
def test_a_suspended_campaign_drains_and_its_flow_run_goes_on_once_resumed(
    site: Site, worker: Terminal, page: Page
) -> None:
    run_url = site.folder / "runs" / "paused"
    # The run must not exist yet, so the second process has to know it as its own.
    settings = {"training.max_steps": LONG, "budget.max_steps": STEPS_OF_AN_ATTEMPT, "promotion.margin": 0.0}
    run = site.start("campaign/campaign", {**site.campaign("paused", **settings), "resume": "never"})
    wait_for_training(site, "paused")
    press(page, f"{site.url}/runs/flow-run/{run}", "Suspend")
    wait_until(lambda: (run_url / "attempts" / "0000.ended").exists(), "the attempt to end", 60)
    wait_until(lambda: stages_of(run_url) == [], "every stage to end", 30)
    assert site.state(run) == "Suspended"
    drained = balanced_status(run_url)
    assert drained["steps"] < STEPS_OF_AN_ATTEMPT
    assert not (run_url / "summary.json").exists()

    press(page, f"{site.url}/runs/flow-run/{run}", "Resume")
    state = site.wait_until_over(run)
    assert state["type"] == "COMPLETED", state
    assert balanced_status(run_url)["steps"] == drained["steps"] + STEPS_OF_AN_ATTEMPT
    assert read_decision(open_store(str(run_url)), attempt=1) is not None
    assert (run_url / "reports" / "0001.md").exists()


@pytest.mark.faults
def test_a_worker_that_is_stopped_drains_its_campaign_which_then_goes_on(site: Site, worker: Terminal) -> None:
    parameters = site.campaign("moved", **{"training.max_steps": LONG})
    first = site.start("campaign/campaign", parameters)
    wait_for_training(site, "moved")
    # Of the terminal's processes the worker alone: `make` and the flow run get no signal.
    os.kill(worker.child_pid(), signal.SIGTERM)
    worker.process.wait(timeout=90)
    assert site.flow_run(first)["state"]["type"] == "CRASHED"
    assert stages_of(site.folder / "runs" / "moved") == []

    with site.worker():
        shorter = {"training.max_steps": LONG, "budget.max_steps": 2}
        second = site.start("campaign/campaign", site.campaign("moved", **shorter))
        assert site.wait_until_over(second)["type"] == "COMPLETED"
    assert (site.folder / "runs" / "moved" / "attempts" / "0001.json").exists()
