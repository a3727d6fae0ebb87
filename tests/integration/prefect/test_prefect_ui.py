"""A campaign in the UI of a real Prefect server, read through its API."""

import re

import pytest
from support.campaigns.campaigns import FROM_SCRATCH, Millrace, await_end, stages_of, wait_until
from support.campaigns.prefect_server import events_of, find, flow_run_of, prefect_client

pytestmark = pytest.mark.campaign


def versions_saved(prefect_api: str, run_id: str) -> list[int]:
    """The policy versions whose checkpoints were reported, in order."""
    events = events_of(prefect_api, run_id)
    return [event.payload["policy_version"] for event in events if event.kind == "checkpoint.saved"]


def test_the_server_knows_the_run_its_stage_tasks_their_logs_and_its_progress(
    millrace: Millrace, prefect_api: str
) -> None:
    millrace.finish("seen", **FROM_SCRATCH)
    run = flow_run_of(prefect_api, "seen")
    assert run["name"] == "seen, attempt 0"
    assert run["state"]["type"] == "COMPLETED"
    # The model learns next to nothing in six steps, and either may happen.
    message = re.fullmatch(r"(v6 (promoted|held back), 0\.\d{3} → 0\.\d{3}); version 6 of 6", run["state"]["message"])
    assert message is not None, run["state"]["message"]
    mine = {"flow_run_id": {"any_": [run["id"]]}}
    tasks = {task["name"]: task for task in find(prefect_api, "task_runs", flow_runs={"id": {"any_": [run["id"]]}})}
    stages = {"generate-0", "score-0", "train-0", "sync_weights-0"}
    assert stages <= set(tasks)
    assert {tasks[stage]["state"]["type"] for stage in stages} == {"COMPLETED"}
    assert tasks["train-0"]["state"]["message"] == "trainer stopped at version 6, checkpointed"
    for stage in [*stages, "bootstrap"]:
        logs = find(prefect_api, "logs", logs={"task_run_id": {"any_": [tasks[stage]["id"]]}})
        words = "warm start step" if stage == "bootstrap" else "ready"
        assert any(words in log["message"] for log in logs), f"{stage} logged nothing"
    shown = find(prefect_api, "artifacts", artifacts=mine)
    artifacts = {artifact["key"]: artifact for artifact in shown}
    assert len(artifacts) == len(shown), "one of each kind"
    assert artifacts["seen-progress"]["data"] == 100.0
    assert "accuracy, version " in artifacts["seen-figures"]["data"]
    with prefect_client(prefect_api) as client:
        states = client.get("/flow_run_states/", params={"flow_run_id": run["id"]}).json()
    messages = [state["message"] for state in states if state["type"] == "RUNNING" and state["message"]]
    assert messages, "a state Running says what the run does"
    assert message[2] == "held back" or "--promoted" in artifacts["seen-report"]["data"]
    wait_until(lambda: 6 in versions_saved(prefect_api, "seen"), "the event of the last checkpoint", 30)
    assert versions_saved(prefect_api, "seen") == [2, 4, 6]


@pytest.mark.extended
def test_a_campaign_at_a_terminal_that_is_cancelled_in_the_ui_drains_and_says_so(
    millrace: Millrace, prefect_api: str
) -> None:
    process = millrace.start(*millrace.campaign("cancelled", **{"training.max_steps": 100_000}))
    millrace.wait_for_version("cancelled", 1)
    run = flow_run_of(prefect_api, "cancelled")
    cancelling = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
    with prefect_client(prefect_api) as client:
        client.post(f"/flow_runs/{run['id']}/set_state", json=cancelling)
    ended = await_end(process, 120)
    assert ended.code == 4, ended.output
    again = ended.output.rpartition("continue with:\n")[2].strip()
    assert " run " in again
    assert again.endswith("--run-id cancelled --resume")
    assert stages_of(millrace.root / "cancelled") == []
    run = flow_run_of(prefect_api, "cancelled")
    assert run["state"]["type"] == "CANCELLED"
    assert (millrace.root / "cancelled" / "attempts" / "0000.ended").exists()
