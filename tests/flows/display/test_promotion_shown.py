"""Artifact keys, links and messages of a campaign in the Prefect UI."""

import re

import pytest

from flows.display.artifacts import DASHBOARD_URL, artifact_key, dashboard_link, final_message
from millrace.evaluation.promotion import PromotionDecision, decide

STATUS = {"state": "stopped", "steps": 90, "max_steps": 4000, "first_step": 60, "early_stop": None}


def decision_of(accuracy: float) -> PromotionDecision:
    start = {"policy_version": 0, "accuracy": 0.34, "prompts": 512}
    candidate = {"policy_version": 90, "accuracy": accuracy, "prompts": 512}
    return decide(90, candidate, promoted=None, start=start, margin=0.0)


def test_the_last_state_names_the_promoted_version_and_its_gain() -> None:
    unmeasured = decide(90, None, promoted=None, start=None, margin=0.0)
    assert final_message(decision_of(0.57), STATUS) == "v90 promoted, 0.340 → 0.570; version 90 of 4,000"
    assert final_message(decision_of(0.3), STATUS) == "v90 held back, 0.340 → 0.300; version 90 of 4,000"
    assert final_message(unmeasured, STATUS) == "v90 held back; version 90 of 4,000"
    assert final_message(None, STATUS) == "version 90 of 4,000"


def test_a_finished_run_submitted_again_says_that_nothing_was_trained() -> None:
    again = {**STATUS, "state": "finished", "steps": 4000, "first_step": 4000}
    message = final_message(decision_of(0.3), again)
    assert message.startswith("already finished at version 4,000: nothing was trained")
    assert "training.max_steps" in message
    assert final_message(decision_of(0.57), again).startswith("v90 promoted, 0.340 → 0.570; already finished")
    early = {**again, "steps": 90, "first_step": 90, "early_stop": "5 evaluations were not better"}
    assert "evaluation.stop_after" in final_message(None, early)
    assert "nothing was trained" not in final_message(None, {**again, "first_step": 3990})


@pytest.mark.parametrize(
    ("run_id", "expected"), [("tiny-nightly", "tiny-nightly-report"), ("A_b.7-", "a-b-7-report"), ("-", "run-report")]
)
def test_a_key_carries_the_run_in_the_letters_that_prefect_allows(run_id: str, expected: str) -> None:
    assert artifact_key(run_id, "report") == expected
    assert re.fullmatch(r"[a-z0-9-]+", expected)


def test_the_dashboard_link_leads_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DASHBOARD_URL, raising=False)
    assert dashboard_link("mine") is None
    monkeypatch.setenv(DASHBOARD_URL, "http://host:8080/")
    assert dashboard_link("mine") == "http://host:8080/run/mine"
