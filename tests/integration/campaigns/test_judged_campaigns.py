"""Campaigns whose reward is a judge: killed, limited, resumed, and replayed without the judge."""

from pathlib import Path
from typing import Any

import pytest
from support.campaigns.campaigns import Millrace, assert_balanced
from support.rewards.stub_service import StubService, graded, stub_service
from support.streams.rows import read_rows

from storage import layout
from storage.schema import SCORE, TRAJECTORY

pytestmark = pytest.mark.campaign

BATCH = 8 * 8
"""Rows of a part: groups times responses."""
AHEAD = 4
"""Parts that wait for the judge at once."""


def judged_by(service: StubService, **endpoint: object) -> dict[str, object]:
    settings = {f"scoring.endpoint.{name}": value for name, value in endpoint.items()}
    return {
        "scoring.reward": "judge",
        "scoring.endpoint.url": service.url,
        "scoring.judge.model": "large",
        "scoring.judge.input_price": 1.0,
        "evaluation.every": None,
        **settings,
    }


def grade(response: str, expected: str) -> float:
    """Most responses get some of it."""
    return 10.0 if response == expected else float(len(response))


def test_a_killed_scorer_has_nothing_judged_twice_that_was_committed_and_a_replay_needs_no_judge(
    millrace: Millrace, tmp_path: Path
) -> None:
    kills = ("score-0 score.before_commit 2 kill", "score-0 put.mid:streams/scores/*/seg/* 3 kill")
    with stub_service(graded(grade)) as service:
        armed = millrace.arm(tmp_path / "fired", *kills)
        summary = millrace.finish("judged", **judged_by(service))
        assert armed.missed() == []
    store = millrace.store("judged")
    rows = read_rows(store, layout.annotations("scores/judge", 0, 0, 1), SCORE)
    assert len(rows) >= 6 * 16 * 8
    assert {row["status"] for row in rows} == {"ok"}
    evaluated = 2 * 32
    asked = len(service.asked) - evaluated
    assert len(rows) <= asked <= len(rows) + len(kills) * AHEAD * BATCH
    services = summary["services"]
    assert len(service.asked) <= services["requests"] <= len(service.asked) + len(kills) * AHEAD * BATCH
    assert services["cost"] == pytest.approx(services["input_tokens"] / 1e6)
    # The judge is gone.
    millrace.run("fsck", store.url).expect_success()
    millrace.run("replay", store.url, "--root", str(millrace.root), "--verify").expect_success()
    again = ("--root", str(millrace.root), "--run-id", "again", "--rescore", "judge")
    millrace.run("replay", store.url, *again).expect_success()
    assert rewards_of(millrace, "again") == [row["reward"] for row in rows]


def rewards_of(millrace: Millrace, run_id: str) -> list[Any]:
    return [
        row["reward"] for row in read_rows(millrace.store(run_id), layout.annotations("scores/judge", 0, 0, 1), SCORE)
    ]


def test_a_limit_ends_the_run_and_a_higher_one_goes_on(millrace: Millrace) -> None:
    with stub_service(graded(grade)) as service:
        limited = millrace.run(*millrace.campaign("limited", **judged_by(service, max_requests=600)))
        assert "scoring.endpoint.max_requests" in limited.expect_refusal()
        assert len(service.asked) <= 600
        summary = millrace.finish("limited", "--resume", **judged_by(service, max_requests=100_000))
    assert summary["steps"] == 6
    assert_balanced(summary)
    scored = read_rows(millrace.store("limited"), layout.annotations("scores/judge", 0, 0, 1), SCORE)
    generated = read_rows(millrace.store("limited"), layout.trajectories(0), TRAJECTORY)
    assert [row["row_id"] for row in scored] == [row["row_id"] for row in generated][: len(scored)]


@pytest.mark.extended
def test_a_judge_that_never_grades_ends_the_run_with_one_line(millrace: Millrace) -> None:
    with stub_service(lambda _: (200, {"choices": [{"message": {"content": "Lovely."}}]})) as service:
        ended = millrace.run(*millrace.campaign("lovely", **judged_by(service)))
    assert "scoring.reward" in ended.expect_refusal()
