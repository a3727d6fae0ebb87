"""Figures, notifications and panel of a campaign at the terminal."""

import io
from typing import Any

import pytest
from rich.console import Console
from support.campaigns.status import STATUS, status_with

from flows.display.key_figures import decision_rows, evaluation_line, evaluation_rows, figures, source_rows
from flows.display.live_view import Notifications, panel, plain_line


def shown(status: dict[str, Any], **console_options: Any) -> str:
    output = io.StringIO()
    Console(file=output, **{"width": 120, **console_options}).print(panel(status))
    return output.getvalue()


def test_a_plain_line_has_step_time_reward_staleness_queue_and_speed() -> None:
    line = plain_line(STATUS)
    for part in (
        "step 7/4000",
        "12 min 34 s, 1.5 s per step, about 50 s left",
        "reward 0.44",
        "mean 1.50, max 2 of 4",
        "length 0.991, reward –",
        "queue 28",
        "tokens per second generate 19 (busy 50%), score 17 (busy 50%)",
    ):
        assert part in line
    none_yet = {"histogram": {}, "mean": None, "max": None, "bound": 4, "admission_only": False}
    young = status_with(reward_mean=None, staleness=none_yet)
    assert "reward – | staleness mean –, max – of 4" in plain_line(young)


def test_a_bound_of_admission_is_not_shown_as_one_of_training() -> None:
    kept = {**status_with()["staleness"], "max": 16, "admission_only": True}
    assert "staleness mean 1.50, max 16, admitted within 4 |" in plain_line(status_with(staleness=kept))


def test_the_panel_shows_every_stage_that_is_alive_and_no_markup() -> None:
    text = shown(STATUS)
    assert "waiting for [room] on GPUs 4, 5" in text
    assert "train-0" in text
    assert "generate 19 (busy 50%)" in text
    assert "bootstrap-0" not in text


def test_a_terminal_of_24_lines_shows_every_stage_and_the_accuracy() -> None:
    stages = ("evaluate-0", "score-0", "sync_weights-0", "train-0", *(f"generate-{n}" for n in range(16)))
    doing = {name: "waiting for room" if name == "generate-3" else "at work" for name in stages}
    evaluated = {name: {**SAMPLED, "policy_version": version} for name, version in (("start", 0), ("end", 90))}
    status = status_with(
        doing=doing, ready=dict.fromkeys(stages, True), devices={}, eval=evaluated, best=EVALUATED, sources=SOURCES
    )
    visible = shown(status, width=80).splitlines()[:23]
    for stage in ("evaluate-0", "generate ×16", "score-0", "sync_weights-0", "train-0"):
        assert sum(line.startswith(stage) for line in visible) == 1, stage
    text = "\n".join(visible)
    assert "15 at work, 1 waiting for room" in text
    assert "accuracy, version 90" in text
    assert "best version" in text


def test_before_generation_the_panel_shows_the_phase_and_no_figures() -> None:
    young = status_with(
        steps=0,
        eval={},
        doing={"bootstrap-0": "warm start step 30 of at most 400", "train-0": "train"},
        ready={"bootstrap-0": False},
    )
    young["ledger"]["generated"] = {"rollouts": 0, "tokens": 0}
    text = shown(young)
    assert "mine: making the start model" in text
    assert "warm start step 30 of at most 400" in text
    assert "ledger" not in text
    assert "tokens per second" not in text
    assert "train-0" not in text, "an earlier attempt's"


def test_control_characters_of_a_run_do_not_reach_the_terminal() -> None:
    name = "train-0\x1b[2J"
    hostile = {"run_id": "mine\x1b]0;title\x07", "doing": {name: "\x1b[31mtrain"}, "ready": {name: True}}
    text = shown(STATUS | hostile, force_terminal=True, color_system=None)
    assert "\x07" not in text
    assert "\x1b]" not in text
    assert r"\x1b[31mtrain" in text
    assert "\x1b[2J" not in text


def test_the_figures_hold_the_ledger_and_the_accuracy() -> None:
    text = " ".join(value for _, value in figures(STATUS))
    for part in (
        "100 generated = 64 trained",
        "20 buffered + 8 in flight",
        "stale 8",
        "0.250 of 512",
        "0: 16 (25%)  2: 48 (75%)",
    ):
        assert part in text


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
    "sets": {"hard": {"accuracy": 0.125, "accuracy_interval": [0.1, 0.15], "prompts": 64}},
}
EVALUATED: dict[str, Any] = {
    "policy_version": 20,
    "accuracy": {"held_out": 0.5, "hard": 0.125},
    "interval": [0.4567, 0.5433],
    "prompts": 512,
}


def test_the_figures_hold_every_estimate_of_an_evaluation() -> None:
    evaluated = status_with(eval={"end": SAMPLED}, best=EVALUATED, early_stop="no better since version 20")
    values = dict(figures(evaluated))
    assert values["accuracy, version 90"] == "0.500 [0.457, 0.543] of 512 held-out prompts"
    assert values["sampled, version 90"] == (
        "pass@1 0.400 [0.370, 0.430], pass@2 0.600 [0.560, 0.640], majority of 2 2.250"
    )
    assert values["hard, version 90"] == "0.125 [0.100, 0.150] of 64 prompts"
    assert values["best version"] == "20: held-out accuracy 0.500 [0.457, 0.543] of 512 prompts; hard 0.125"
    assert values["early stop"] == "no better since version 20"
    assert "0.500 [0.457, 0.543]" in shown(evaluated), "an interval is not markup"


def test_an_evaluation_without_any_score_has_no_accuracy() -> None:
    unscored = {"policy_version": 0, "accuracy": None, "accuracy_interval": None, "prompts": 512, "errors": 512}
    assert dict(figures(status_with(eval={"start": unscored})))["accuracy, version 0"].startswith("not scored")
    partly = {"policy_version": 0, "accuracy": 0.5, "prompts": 512, "errors": 12}
    assert dict(figures(status_with(eval={"start": partly})))["accuracy, version 0"].endswith("12 without a score")
    short = {"policy_version": 5, "accuracy": {"held_out": None}, "interval": None, "prompts": 512}
    assert "not scored" in evaluation_line(short)


def test_the_table_of_evaluations_marks_the_best_version() -> None:
    later = {**EVALUATED, "policy_version": 1040, "accuracy": {"held_out": 0.25}, "interval": None}
    assert evaluation_rows(status_with(evaluations=[EVALUATED, later], best=EVALUATED)) == [
        {"version": "20", "held_out": "0.5000 [0.457, 0.543]", "hard": "0.1250", "note": "best"},
        {"version": "1,040", "held_out": "0.2500", "note": ""},
    ]


SOURCES: dict[str, Any] = {
    "sums": {
        "weight": 1.25,
        "trained_share": 0.5556,
        "groups_trained": 1250,
        "groups_dropped": 31,
        "reward_mean": 0.875,
        "accuracy": 0.5,
    },
    "a-name-of-thirty-two-characters-": {
        "weight": 1.0,
        "trained_share": 0.4444,
        "groups_trained": 1000,
        "groups_dropped": 0,
        "reward_mean": None,
        "accuracy": None,
    },
}


def test_several_sources_are_a_table_below_the_figures() -> None:
    text = shown(status_with(sources=SOURCES), width=80)
    rows = text[text.index("source ") :].splitlines()
    assert rows[2].split() == ["sums", "1.25", "(55.6%)", "1,250", "(55.6%)", "31", "0.88", "0.500"]
    assert rows[3].split()[1:] == ["1", "(44.4%)", "1,000", "(44.4%)", "0", "–", "–"], "the name is folded"
    assert shown(STATUS) in shown(status_with(sources=SOURCES)), "everything else is as without"


def test_a_source_has_no_share_before_a_block_of_prompts_and_a_step() -> None:
    young = {"sums": SOURCES["sums"] | {"weight": None, "trained_share": None, "groups_trained": 0}}
    [row] = source_rows(status_with(sources=young))
    assert (row["weight now"], row["groups trained"]) == ("–", "0")


RESTART = {"t": 60.0, "kind": "stage.restarted", "sentence": "train-0 was started again: killed", "stage": "train-0"}
ALARM = {"t": 61.0, "kind": "pipeline.stalled", "sentence": "nothing has moved for 120 s", "stage": None}


def test_each_event_of_this_attempt_is_notified_once() -> None:
    notifications = Notifications(started=60.5)
    devices = {"train-0": ["0", "1"]}
    later = {**EVALUATED, "policy_version": 40, "interval": None}
    earlier = {"counts": {}, "latest": [RESTART]}
    first = status_with(evaluations=[EVALUATED], incidents=earlier, devices=devices)
    assert notifications.look(first) == ["train-0 on GPUs 0, 1"]
    incidents = {"counts": {}, "latest": [RESTART, ALARM]}
    news = status_with(evaluations=[EVALUATED, later], incidents=incidents, devices=devices)
    evaluation, incident = notifications.look(news)
    assert evaluation == "version 40: held-out accuracy 0.500 of 512 prompts; hard 0.125"
    assert incident.endswith(":01 nothing has moved for 120 s")
    assert notifications.look(news) == []


def test_the_figures_count_incidents_and_list_the_latest() -> None:
    counts = {"stage.restarted": 2, "pipeline.stalled": 1}
    rows = figures(status_with(incidents={"counts": counts, "latest": [RESTART, ALARM]}))
    first = rows.index(("incidents", "stage.restarted 2, pipeline.stalled 1"))
    assert [value[9:] for _, value in rows[first + 1 : first + 3]] == [RESTART["sentence"], ALARM["sentence"]]


RAISED: dict[str, Any] = {
    "policy_version": 12,
    "max_staleness": 2,
    "reason": "the trainer waits 31% of its time",
    "change": "bound raised to 2",
}


def test_the_figures_hold_the_newest_decision_and_its_reason() -> None:
    rolled_back = {
        **RAISED,
        "policy_version": 1010,
        "change": "rolled back to version 10",
        "reason": "version 27: gone",
    }
    rows = figures(status_with(decisions={"count": 1, "latest": [RAISED]}))
    first = rows.index(("control", "1 decision, the newest at version 12"))
    assert rows[first + 1] == ("", f"bound raised to 2: {RAISED['reason']}")
    decided = status_with(decisions={"count": 41, "latest": [RAISED, rolled_back]})
    assert ("control", "41 decisions, the newest at version 1,010") in figures(decided)
    assert decision_rows(decided) == [
        {
            "version": "12",
            "decision": "bound raised to 2",
            "bound": "2",
            "reason": RAISED["reason"],
        },
        {
            "version": "1,010",
            "decision": "rolled back to version 10",
            "bound": "2",
            "reason": "version 27: gone",
        },
    ]


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"scores": {"rollouts": 1024, "errors": 512}}, "errors", "512 of 1,024 responses got no score"),
        (
            {"services": {"requests": 1024, "input_tokens": 9000, "output_tokens": 800, "cost": 0.25}},
            "services",
            "1,024 requests, 9,000 tokens read, 800 written, cost 0.25",
        ),
        (
            {"ledger": STATUS["ledger"] | {"generated_twice": {"tokens": 48}}},
            "repeated",
            "48 tokens were generated twice",
        ),
        (
            {"ledger": STATUS["ledger"] | {"masked": {"rollouts": 7, "tokens": 19}}},
            "masked",
            "19 tokens in 7 rollouts, 10.0% of those trained",
        ),
        ({"zero_advantage_share": 0.25}, "without spread", "25% of the last groups have rewards that are all equal"),
        ({"curriculum": {"easy": 0.25, "hard": 0.1}}, "curriculum", "25% of the prompts are easy, 10% are hard"),
    ],
)
def test_a_figure_that_most_runs_lack_is_shown_where_it_exists(changes: dict[str, Any], name: str, value: str) -> None:
    assert (name, value) in figures(status_with(**changes))
    assert name not in dict(figures(STATUS))
