"""What a person at a terminal reads."""

import copy
import io
from typing import Any

import pytest
from rich.console import Console

from flows.display.key_figures import decision_rows, evaluation_line, figures
from flows.display.live_view import Notifications, panel, plain_line

STATUS: dict[str, Any] = {
    "run_id": "mine",
    "run_url": "/runs/mine",
    "state": "running",
    "cause": None,
    "steps": 7,
    "max_steps": 40,
    "stop_at_step": 40,
    "reward_mean": 0.4375,
    "wall_seconds": 754.0,
    "step_seconds": 1.5,
    "eta_seconds": 49.5,
    "eval": {"start": {"policy_version": 0, "accuracy": 0.25, "prompts": 512}},
    "evaluations": [],
    "best": None,
    "early_stop": None,
    "incidents": {"counts": {}, "restarts": {}, "latest": []},
    "decisions": {"count": 0, "latest": []},
    "doing": {"bootstrap-0": "stopped", "train-0": "train", "generate-0": "waiting for [room]"},
    "ready": {"bootstrap-0": False, "train-0": True, "generate-0": True},
    "policy_versions_used": 8,
    "staleness": {"histogram": {"0": 16, "2": 48}, "mean": 1.5, "max": 2, "bound": 4},
    "trained_to_taken": {"length": 0.9912, "reward": None},
    "plan": {},
    "zero_advantage_share": None,
    "curriculum": None,
    "ledger": {
        "generated": {"rollouts": 100, "tokens": 300},
        "trained": {"rollouts": 64, "tokens": 190},
        "masked": {"rollouts": 0, "tokens": 0},
        "buffered": {"rollouts": 20, "tokens": 60},
        "in_flight": {"rollouts": 8, "tokens": 25},
        "dropped": {"stale": {"rollouts": 8, "tokens": 25}},
        "generated_twice": {"tokens": 0},
    },
    "scores": {"rollouts": 92, "errors": 0},
    "tokens": {"generate": 300, "score": 275, "train": 190},
    "weight_sync": {"transport": "shm", "count": 8, "p50_seconds": 0.0041, "bytes": 1000},
}


def status(**changes: object) -> dict[str, Any]:
    return {**copy.deepcopy(STATUS), **changes}


def test_a_plain_line_says_step_reward_staleness_queue_and_speed() -> None:
    line = plain_line(STATUS, {"generate": 1234.5})
    for said in (
        "step 7/40",
        "12 min 34 s, 1.5 s per step, about 50 s left",
        "reward 0.44",
        "mean 1.50 max 2 of 4",
        "length 0.991, reward –",
        "queue 28",
        "generate 1,234 tok/s",
    ):
        assert said in line


def test_the_panel_shows_every_stage_that_is_alive_and_takes_nothing_for_markup() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(panel(STATUS, {"generate": 10.0}))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "waiting for [room]" in shown
    assert "train-0" in shown
    assert "generate 10" in shown
    assert "bootstrap-0" not in shown


def test_before_anything_was_generated_the_panel_shows_the_phase_and_no_figures() -> None:
    young = status(
        steps=0,
        eval={},
        doing={"bootstrap-0": "warm start step 30 of at most 400", "train-0": "train"},
        ready={"bootstrap-0": False},
    )
    young["ledger"]["generated"] = {"rollouts": 0, "tokens": 0}
    console = Console(file=io.StringIO(), width=80)
    console.print(panel(young, {"generate": 0.0}))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "mine: making the start model" in shown
    assert "warm start step 30 of at most 400" in shown
    assert "ledger" not in shown
    assert "tokens per second" not in shown
    assert "train-0" not in shown, "an earlier attempt's"


def test_the_figures_hold_the_ledger_and_the_accuracy() -> None:
    told = " ".join(value for _, value in figures(STATUS))
    for said in ("100 generated = 64 trained", "20 buffered + 8 in flight", "stale 8", "0.250 of 512", "0: 16  2: 48"):
        assert said in told


SAMPLED: dict[str, Any] = {
    "accuracy": 0.5,
    "accuracy_interval": [0.4567, 0.5433],
    "policy_version": 90,
    "prompts": 512,
    "samples": 2,
    "pass_at": {
        "1": {"value": 0.4, "low": 0.37, "high": 0.43},
        "2": {"value": 0.6, "low": 0.56, "high": 0.64},
    },
    "majority": {"value": 2.25, "low": None, "high": None},
}


def test_the_figures_hold_intervals_pass_at_k_and_the_majority_where_they_were_measured() -> None:
    found = dict(figures(status(eval={"end": SAMPLED})))
    assert found["accuracy, version 90"] == "0.500 [0.457, 0.543] of 512 held-out prompts"
    assert found["sampled, version 90"] == (
        "pass@1 0.400 [0.370, 0.430], pass@2 0.600 [0.560, 0.640], majority of 2 2.250"
    )
    console = Console(file=io.StringIO(), width=160)
    console.print(panel(status(eval={"end": SAMPLED}), {}))
    assert isinstance(console.file, io.StringIO)
    assert "0.500 [0.457, 0.543]" in console.file.getvalue(), "an interval is no markup"


EVALUATED: dict[str, Any] = {
    "policy_version": 20,
    "accuracy": {"held_out": 0.5, "hard": 0.125},
    "interval": [0.4567, 0.5433],
    "prompts": 512,
}


def test_the_figures_name_the_best_version_further_sets_and_why_training_ended_early() -> None:
    end = {**SAMPLED, "sets": {"hard": {"accuracy": 0.125, "accuracy_interval": [0.1, 0.15], "prompts": 64}}}
    found = dict(figures(status(eval={"end": end}, best=EVALUATED, early_stop="no better since version 20")))
    assert found["best version"] == "20: held-out accuracy 0.500 [0.457, 0.543] of 512 prompts; hard 0.125"
    assert found["hard, version 90"] == "0.125 [0.100, 0.150] of 64 prompts"
    assert found["early stop"] == "no better since version 20"


def test_each_evaluation_is_one_line_once_and_those_of_earlier_attempts_are_none() -> None:
    evaluated = Notifications(started=0.0)
    later = {**EVALUATED, "policy_version": 40, "interval": None}
    assert evaluated.look(status(evaluations=[EVALUATED])) == []
    [line] = evaluated.look(status(evaluations=[EVALUATED, later]))
    assert line == "version 40: held-out accuracy 0.500 of 512 prompts; hard 0.125"
    assert evaluated.look(status(evaluations=[EVALUATED, later])) == []


def test_an_evaluation_without_any_score_says_so_in_place_of_an_accuracy() -> None:
    unscored = {"policy_version": 0, "accuracy": None, "accuracy_interval": None, "prompts": 512, "errors": 512}
    found = dict(figures(status(eval={"start": unscored})))
    assert found["accuracy, version 0"].startswith("not scored")
    partly = {"policy_version": 0, "accuracy": 0.5, "prompts": 512, "errors": 12}
    assert dict(figures(status(eval={"start": partly})))["accuracy, version 0"].endswith("12 without a score")
    unscored_again = {"policy_version": 5, "accuracy": {"held_out": None}, "interval": None, "prompts": 512}
    assert "not scored" in evaluation_line(unscored_again)


RESTART = {"t": 60.0, "kind": "stage.restarted", "sentence": "train-0 was started again: killed", "stage": "train-0"}
ALARM = {"t": 61.0, "kind": "pipeline.stalled", "sentence": "nothing has moved for 120 s", "stage": None}


def test_each_incident_is_one_line_once_and_the_figures_count_them() -> None:
    news = Notifications(started=60.5)
    counted = {"counts": {"stage.restarted": 2, "pipeline.stalled": 1}, "restarts": {"train-0": 2}}
    assert news.look(status(incidents={**counted, "latest": [RESTART]})) == []
    incidents = {**counted, "latest": [RESTART, ALARM]}
    [line] = news.look(status(incidents=incidents))
    assert line.endswith(":01 nothing has moved for 120 s")
    assert news.look(status(incidents=incidents)) == []
    told = [one for one in figures(status(incidents=incidents)) if one[0] in ("incidents", "")]
    (_, counts), *latest = told[-3:]
    assert counts == "restarts 2, alarms 1"
    assert [value[9:] for _, value in latest] == [RESTART["sentence"], ALARM["sentence"]]


RAISED: dict[str, Any] = {
    "t": 60.0,
    "incarnation": 0,
    "policy_version": 12,
    "action": "raise",
    "max_staleness": 2,
    "places": 64,
    "reason": "the trainer waits 31% of its time, generators 12%, and effective sample size 0.994",
    "measured": {},
    "change": "bound raised to 2",
}


def test_the_figures_hold_the_newest_decision_and_its_reason_once_there_is_one() -> None:
    assert "control" not in dict(figures(STATUS))
    rolled_back = {**RAISED, "policy_version": 10, "change": "rolled back to version 10", "reason": "version 27: gone"}
    told = figures(status(decisions={"count": 1, "latest": [RAISED]}))
    first = told.index(("control", "1 decision, the newest at version 12"))
    assert told[first + 1] == ("", f"bound raised to 2: {RAISED['reason']}")
    told = figures(status(decisions={"count": 41, "latest": [RAISED, rolled_back]}))
    first = told.index(("control", "41 decisions, the newest at version 10"))
    assert told[first + 1] == ("", "rolled back to version 10: version 27: gone")


def test_the_table_of_decisions_has_a_row_for_each_with_its_reason() -> None:
    places = {**RAISED, "policy_version": 1200, "change": "80 places", "places": 80, "reason": "the trainer waits"}
    assert decision_rows(status(decisions={"count": 2, "latest": [RAISED, places]})) == [
        {
            "version": "12",
            "decision": "bound raised to 2",
            "bound": "2",
            "places": "64",
            "reason": RAISED["reason"],
        },
        {
            "version": "1,200",
            "decision": "80 places",
            "bound": "2",
            "places": "80",
            "reason": "the trainer waits",
        },
    ]


EXCEPTIONAL: list[tuple[dict[str, Any], str, str]] = [
    (
        {"scores": {"rollouts": 1024, "errors": 512}},
        "errors",
        "512 of 1,024 responses got no score",
    ),
    ({"ledger": STATUS["ledger"] | {"generated_twice": {"tokens": 48}}}, "", "48 tokens were generated twice"),
    (
        {"ledger": STATUS["ledger"] | {"masked": {"rollouts": 7, "tokens": 19}}},
        "masked",
        "19 tokens in 7 rollouts, 10.0% of those trained",
    ),
    ({"zero_advantage_share": 0.25}, "without spread", "25% of the last groups have rewards that are all equal"),
    ({"curriculum": {"easy": 0.25, "hard": 0.1}}, "curriculum", "25% of the prompts are easy, 10% are hard"),
]


@pytest.mark.parametrize(("changes", "name", "value"), EXCEPTIONAL)
def test_a_figure_that_is_mostly_absent_is_shown_once_there_is_something_to_say(
    changes: dict[str, Any], name: str, value: str
) -> None:
    assert (name, value) in figures(status(**changes))
    assert (name, value) not in figures(STATUS)


def test_nothing_known_yet_is_shown_as_a_dash() -> None:
    young = status(reward_mean=None, staleness={"histogram": {}, "mean": None, "max": None, "bound": 4})
    assert "reward –" in plain_line(young, {})


def test_control_characters_of_a_run_do_not_reach_the_terminal() -> None:
    name = "train-0\x1b[2J"
    hostile = {"run_id": "mine\x1b]0;title\x07", "doing": {name: "\x1b[31mtrain"}, "ready": {name: True}}
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    console.print(panel(STATUS | hostile, {}))
    shown = console.file.getvalue()
    assert "\x07" not in shown
    assert "\x1b]" not in shown
    assert r"\x1b[31mtrain" in shown
    assert "\x1b[2J" not in shown
