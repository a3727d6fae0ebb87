"""Nights of one minute each: a schedule, a budget, one run that is continued, and the gate that it passes once."""

import json
from pathlib import Path

import pytest
from support.campaigns.campaigns import assert_balanced, stages_of, wait_until
from support.campaigns.deployed import Site

from storage import layout
from storage.checkpoints import read_latest
from storage.stores.factory import open_store

pytestmark = [pytest.mark.campaign, pytest.mark.faults, pytest.mark.timeout(1000)]

STEPS, STEPS_A_NIGHT = 200, 160
# The first night of the demo's task teaches much more than this, the second night less.
MARGIN = 0.2


def test_a_schedule_of_one_minute_continues_its_run_and_promotes_once(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.server(), site.worker():
        deployment = site.deployment("campaign/campaign")
        parameters = deployment["parameters"]
        config = parameters["config"]
        config |= {"name": "nights", "budget": {"max_steps": STEPS_A_NIGHT}, "promotion": {"margin": MARGIN}}
        config["training"]["max_steps"] = STEPS
        # Two threads crawl where other tests are at work.
        config["storage"]["root"] = str(tmp_path / "runs")
        every_minute = {"slug": "minutely", "active": True, "schedule": {"interval": 60}, "parameters": parameters}
        (schedule,) = site.api.post(f"/deployments/{deployment['id']}/schedules", json=[every_minute]).json()

        def completed() -> list[str]:
            return [run["id"] for run in site.flow_runs("campaign/campaign") if run["state"]["type"] == "COMPLETED"]

        wait_until(lambda: len(completed()) >= 2, "two attempts to complete", 900, every=1.0)
        site.api.patch(f"/deployments/{deployment['id']}/schedules/{schedule['id']}", json={"active": False})
        first, second = (site.flow_run(run) for run in completed()[:2])

    assert [run["created_by"]["type"] for run in (first, second)] == ["SCHEDULE", "SCHEDULE"]
    assert first["end_time"] <= second["start_time"], "the second attempt did not wait for the first"
    run = tmp_path / "runs" / "nights"
    summary = json.loads((run / "summary.json").read_text())
    assert sorted(path.name for path in (run / "attempts").glob("*.ended"))[:2] == ["0000.ended", "0001.ended"]
    assert summary["steps"] == STEPS
    assert_balanced(summary)
    gate = [json.loads((run / "attempts" / f"{n:04d}.promotion").read_text()) for n in (0, 1)]
    assert [decision["promoted"] for decision in gate] == [True, False], gate
    promoted = read_latest(open_store(str(run)), layout.PROMOTED)
    assert promoted is not None
    assert promoted.step == STEPS_A_NIGHT
    assert stages_of(run) == []
