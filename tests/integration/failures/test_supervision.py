"""Campaigns whose stages are alive and get nowhere: named, killed, started again, or given up."""

from pathlib import Path

import pytest
from support.campaigns.campaigns import Ended, Millrace, assert_balanced, stages_of, wait_until
from support.campaigns.prefect_server import PrefectEvent, events_of, log_messages
from support.stages.failpoints import Failpoints

from configs.operation import SupervisionConfig
from storage.failpoints import FIRED, SPECS

pytestmark = pytest.mark.campaign

HANG_SECONDS = 5.0
STEPS, ROLLOUTS_PER_STEP = 8, 16 * 8
DEFAULT_SECONDS = SupervisionConfig().hang_seconds
ALARM_SECONDS = 15.0
"""From the end of `hang_seconds` to the alarm, at most."""
PLACES = {
    "generate-0": "generate.before_commit",
    "score-0": "score.before_commit",
    "train-0": "train.mid_step",
    "sync_weights-0": "sync_weights.before_push",
}


def run_hanging(millrace: Millrace, armed: Failpoints, run_id: str, hang_seconds: float = HANG_SECONDS) -> Ended:
    """Runs one campaign to its end. Its failpoints must fire."""
    settings = {"training.max_steps": STEPS, "supervision.hang_seconds": hang_seconds}
    ended = millrace.run(*millrace.campaign(run_id, **settings))
    assert armed.missed() == []
    return ended


def check_the_run(millrace: Millrace, run_id: str) -> None:
    """Checks that the campaign came to its end as if nothing had happened."""
    summary = millrace.summary(run_id)
    assert_balanced(summary)
    assert (summary["state"], summary["steps"]) == ("finished", STEPS)
    assert summary["ledger"]["trained"]["rollouts"] == STEPS * ROLLOUTS_PER_STEP
    assert set(summary["ledger"]["dropped"]) <= {"rolled_back", "stale"}
    assert stages_of(millrace.root / run_id) == []


def events_of_stage(prefect_api: str, run_id: str, kind: str, stage: str) -> list[PrefectEvent]:
    return [
        event for event in events_of(prefect_api, run_id) if (event.kind, event.payload.get("stage")) == (kind, stage)
    ]


def check_the_alarm(
    prefect_api: str, run_id: str, armed: Failpoints, stage: str, hang_seconds: float = HANG_SECONDS
) -> None:
    """Checks that the hang was reported in time to people and automations, and so was the restart."""
    wait_until(lambda: bool(events_of_stage(prefect_api, run_id, "stage.restarted", stage)), f"the restart of {stage}")
    hung = events_of_stage(prefect_api, run_id, "stage.hung", stage)[0]
    restarted = events_of_stage(prefect_api, run_id, "stage.restarted", stage)[0]
    spec, fired = next((spec, when) for spec, when in armed.fired().items() if spec.startswith(f"{stage} "))
    print(f"{run_id}: {spec}: alarm after {hung.t - fired:.1f} s, started again after {restarted.t - fired:.1f} s")
    assert hung.t - fired <= hang_seconds + ALARM_SECONDS
    assert hung.payload["seconds"] >= hang_seconds
    assert {"flow-run", "task-run"} <= hung.related
    sentence = f"{stage} hangs: no sign of progress for "
    wait_until(lambda: any(line.startswith(sentence) for line in log_messages(prefect_api, run_id)), "the log line")
    assert restarted.payload["cause"].startswith(sentence)
    assert restarted.payload["restarts"] == 1


@pytest.mark.extended
def test_hanging_stages_of_each_kind_are_named_and_restarted_and_nothing_is_lost(
    millrace: Millrace, prefect_api: str, tmp_path: Path
) -> None:
    actions = {stage: "hang" if stage == "train-0" else "stop" for stage in PLACES}
    armed = millrace.arm(tmp_path / "fired", *(f"{stage} {PLACES[stage]} 2 {actions[stage]}" for stage in PLACES))
    run_hanging(millrace, armed, "hung").expect_success()
    check_the_run(millrace, "hung")
    for stage in PLACES:
        check_the_alarm(prefect_api, "hung", armed, stage)
    log = (millrace.root / "hung" / "logs" / "train-0.log").read_text()
    assert "failpoints.py" in log, "the stack of the main thread says where it hangs"
    assert events_of(prefect_api, "hung")[0].kind == "version.published"


@pytest.mark.faults
def test_a_stage_that_hangs_again_and_again_ends_the_campaign_with_its_cause(
    millrace: Millrace, prefect_api: str, tmp_path: Path
) -> None:
    places = ["train.mid_step", "train.before_handover", "train.after_handover"]
    armed = millrace.arm(tmp_path / "fired", *(f"train-0 {place} 1 hang" for place in places))
    ended = run_hanging(millrace, armed, "stuck")
    assert ended.code not in (0, 2), ended.output
    assert "train-0 hangs: no sign of progress for " in ended.output
    again = ended.output.rpartition("once the cause is fixed, continue with:\n")[2].splitlines()[0]
    assert " run " in again
    assert again.endswith("--run-id stuck --resume")
    wait_until(lambda: len(events_of_stage(prefect_api, "stuck", "stage.hung", "train-0")) == 3, "the third hang")
    restarted = events_of_stage(prefect_api, "stuck", "stage.restarted", "train-0")
    assert [event.payload["restarts"] for event in restarted] == [1, 2]
    assert stages_of(millrace.root / "stuck") == []

    for name in (SPECS, FIRED):
        millrace.environment.pop(name)
    millrace.finish("stuck", "--resume", **{"training.max_steps": STEPS})
    check_the_run(millrace, "stuck")


@pytest.mark.faults
@pytest.mark.parametrize("action", ["stop", "hang"])
@pytest.mark.parametrize("stage", PLACES)
def test_each_kind_of_stage_alone(
    stage: str, action: str, millrace: Millrace, prefect_api: str, tmp_path: Path
) -> None:
    armed = millrace.arm(tmp_path / "fired", f"{stage} {PLACES[stage]} 3 {action}")
    run_id = f"alone-{stage}-{action}"
    run_hanging(millrace, armed, run_id).expect_success()
    check_the_run(millrace, run_id)
    check_the_alarm(prefect_api, run_id, armed, stage)


@pytest.mark.faults
def test_with_default_settings_the_alarm_is_in_time(millrace: Millrace, prefect_api: str, tmp_path: Path) -> None:
    armed = millrace.arm(tmp_path / "fired", f"generate-0 {PLACES['generate-0']} 2 stop")
    run_hanging(millrace, armed, "default", DEFAULT_SECONDS).expect_success()
    check_the_run(millrace, "default")
    check_the_alarm(prefect_api, "default", armed, "generate-0", DEFAULT_SECONDS)
