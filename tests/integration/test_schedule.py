"""Nights of one minute each: a schedule, a budget, and one run that goes on."""

import json
from pathlib import Path

import pytest
from support.campaigns import assert_balanced, stages_of, wait_until
from support.deployed import Site

pytestmark = [pytest.mark.campaign, pytest.mark.faults]

STEPS, STEPS_A_NIGHT = 6, 3


def test_a_schedule_of_one_minute_runs_twice_and_the_second_attempt_goes_on_with_the_run(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.server(), site.worker():
        deployment = site.deployment("campaign/campaign")
        parameters = site.campaign("nights", **{"training.max_steps": STEPS, "budget.max_steps": STEPS_A_NIGHT})
        every_minute = {"slug": "minutely", "active": True, "schedule": {"interval": 60}, "parameters": parameters}
        (schedule,) = site.api.post(f"/deployments/{deployment['id']}/schedules", json=[every_minute]).json()

        def completed() -> list[str]:
            return [run["id"] for run in site.flow_runs("campaign/campaign") if run["state"]["type"] == "COMPLETED"]

        wait_until(lambda: len(completed()) >= 2, "two attempts to complete", 580)
        site.api.patch(f"/deployments/{deployment['id']}/schedules/{schedule['id']}", json={"active": False})
        first, second = (site.flow_run(run) for run in completed()[:2])

    assert [run["created_by"]["type"] for run in (first, second)] == ["SCHEDULE", "SCHEDULE"]
    assert first["end_time"] <= second["start_time"], "the second attempt did not wait for the first"
    run = tmp_path / "runs" / "nights"
    summary = json.loads((run / "summary.json").read_text())
    assert sorted(path.name for path in (run / "attempts").glob("*.ended"))[:2] == ["0000.ended", "0001.ended"]
    assert summary["steps"] == STEPS
    assert_balanced(summary)
    assert stages_of(run) == []
