"""Campaigns whose stages are alive and get nowhere: named, killed, started again, or given up."""

from pathlib import Path

import pytest
from support.campaigns.campaigns import Ended, Millrace, assert_balanced, stages_of, wait_until
from support.campaigns.delivered import milestones
from support.campaigns.prefect_events import SeenEvent, events_of
from support.stages.failpoints import Failpoints

from configs.operation import SupervisionConfig
from storage.failpoints import FIRED, SPECS

pytestmark = pytest.mark.campaign

HANG_SECONDS = 5.0
STEPS, ROLLOUTS_PER_STEP = 8, 16 * 8
DEFAULT_SECONDS = SupervisionConfig().hang_seconds
ALARM_SECONDS = 15.0
"""After the time without progress, at the latest: a person must have been told by then."""
PLACES = {
    "generate-0": "generate.before_commit",
    "score-0": "score.before_commit",
    "train-0": "train.mid_step",
    "sync_weights-0": "sync_weights.before_push",
}


def run(millrace: Millrace, armed: Failpoints, run_id: str, **settings: object) -> Ended:
    """One campaign with these failpoints, to its end."""
    environment = armed.environment()
    millrace.environment |= {name: environment[name] for name in (SPECS, FIRED)}
    chosen = {"training.max_steps": STEPS, "supervision.hang_seconds": HANG_SECONDS, **settings}
    return millrace.run(*millrace.campaign(run_id, **chosen))


def check_the_run(millrace: Millrace, run_id: str, ended: Ended) -> None:
    """It came to its end as if nothing had been."""
    assert ended.code == 0, ended.output
    summary = millrace.summary(run_id)
    assert_balanced(summary)
    assert (summary["state"], summary["steps"]) == ("finished", STEPS)
    assert summary["ledger"]["trained"]["rollouts"] == STEPS * ROLLOUTS_PER_STEP
    assert set(summary["ledger"]["dropped"]) <= {"rolled_back", "stale"}
    assert stages_of(millrace.root / run_id) == []


def told(prefect_api: str, run_id: str, kind: str, stage: str) -> list[SeenEvent]:
    return [
        event for event in events_of(prefect_api, run_id) if (event.kind, event.payload.get("stage")) == (kind, stage)
    ]


def check_the_alarm(
    prefect_api: str,
    run_id: str,
    armed: Failpoints,
    stage: str,
    place: str,
    action: str,
    hang_seconds: float = HANG_SECONDS,
) -> None:
    """It was told of in time, where a person looks and where an automation does, and so was the restart."""
    wait_until(lambda: bool(told(prefect_api, run_id, "stage.restarted", stage)), f"the restart of {stage}")
    hung = told(prefect_api, run_id, "stage.hung", stage)[0]
    restarted = told(prefect_api, run_id, "stage.restarted", stage)[0]
    fired = next(when for spec, when in armed.fired().items() if spec.startswith(f"{stage} {place} "))
    print(
        f"{run_id}: {stage} {action} at {place}: alarm after {hung.t - fired:.1f} s, "
        f"started again after {restarted.t - fired:.1f} s"
    )
    assert hung.t - fired <= hang_seconds + ALARM_SECONDS
    assert hung.payload["seconds"] >= hang_seconds
    assert {"flow-run", "task-run"} <= hung.related
    sentence = f"{stage} hangs: no sign of progress for "
    wait_until(lambda: any(line.startswith(sentence) for line in milestones(prefect_api, run_id)), "a line of the log")
    assert restarted.payload["cause"].startswith(sentence)
    assert restarted.payload["restarts"] == 1


@pytest.mark.extended
def test_a_stage_of_each_kind_that_goes_no_further_is_named_and_started_again_and_nothing_is_lost(
    millrace: Millrace, prefect_api: str, tmp_path: Path
) -> None:
    actions = {stage: "hang" if stage == "train-0" else "stop" for stage in PLACES}
    armed = Failpoints(tmp_path / "fired", *(f"{stage} {PLACES[stage]} 2 {actions[stage]}" for stage in PLACES))
    ended = run(millrace, armed, "hung")
    assert armed.missed() == []
    check_the_run(millrace, "hung", ended)
    for stage, place in PLACES.items():
        check_the_alarm(prefect_api, "hung", armed, stage, place, actions[stage])
    log = (millrace.root / "hung" / "logs" / "train-0.log").read_text()
    assert "failpoints.py" in log, "the stack of the main thread says where it hangs"
    assert events_of(prefect_api, "hung")[0].kind == "version.published"


@pytest.mark.faults
def test_a_stage_that_hangs_again_and_again_is_given_up_and_ends_the_campaign_with_its_cause(
    millrace: Millrace, prefect_api: str, tmp_path: Path
) -> None:
    places = ["train.mid_step", "train.before_handover", "train.after_handover"]
    armed = Failpoints(tmp_path / "fired", *(f"train-0 {place} 1 hang" for place in places))
    ended = run(millrace, armed, "stuck")
    assert armed.missed() == []
    assert ended.code not in (0, 2), ended.output
    assert "train-0 hangs: no sign of progress for " in ended.output
    again = ended.output.rpartition("once the cause is mended, continue with:\n")[2].splitlines()[0]
    assert " run " in again
    assert again.endswith("--run-id stuck --resume")
    wait_until(lambda: len(told(prefect_api, "stuck", "stage.hung", "train-0")) == 3, "the third hang")
    restarts = [event.payload["restarts"] for event in told(prefect_api, "stuck", "stage.restarted", "train-0")]
    assert restarts == [1, 2]
    assert stages_of(millrace.root / "stuck") == []

    for name in (SPECS, FIRED):
        millrace.environment.pop(name)
    resumed = millrace.run(*millrace.campaign("stuck", "--resume", **{"training.max_steps": STEPS}))
    check_the_run(millrace, "stuck", resumed)


@pytest.mark.faults
@pytest.mark.parametrize("action", ["stop", "hang"])
@pytest.mark.parametrize("stage", PLACES)
def test_each_kind_of_stage_alone(
    stage: str, action: str, millrace: Millrace, prefect_api: str, tmp_path: Path
) -> None:
    armed = Failpoints(tmp_path / "fired", f"{stage} {PLACES[stage]} 3 {action}")
    run_id = f"alone-{stage}-{action}"
    ended = run(millrace, armed, run_id)
    assert armed.missed() == []
    check_the_run(millrace, run_id, ended)
    check_the_alarm(prefect_api, run_id, armed, stage, PLACES[stage], action)


@pytest.mark.faults
def test_with_the_settings_as_they_come_the_alarm_is_in_time(
    millrace: Millrace, prefect_api: str, tmp_path: Path
) -> None:
    armed = Failpoints(tmp_path / "fired", f"generate-0 {PLACES['generate-0']} 2 stop")
    ended = run(millrace, armed, "default", **{"supervision.hang_seconds": DEFAULT_SECONDS})
    assert armed.missed() == []
    check_the_run(millrace, "default", ended)
    check_the_alarm(prefect_api, "default", armed, "generate-0", PLACES["generate-0"], "stop", DEFAULT_SECONDS)
