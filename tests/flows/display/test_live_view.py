"""What a person at a terminal reads."""

import copy
import io
from typing import Any

import pytest
from rich.console import Console

from flows.display.key_figures import Rates, figures, phase
from flows.display.live_view import Evaluated, panel, plain_line

STATUS: dict[str, Any] = {
    "run_id": "mine",
    "run_url": "/runs/mine",
    "state": "running",
    "steps": 7,
    "max_steps": 40,
    "stop_at_step": 40,
    "reward_mean": 0.4375,
    "eval": {"start": {"accuracy": 0.25, "prompts": 512}},
    "evaluations": [],
    "best": None,
    "early_stop": None,
    "doing": {"bootstrap-0": "stopped", "train-0": "train", "generate-0": "waiting for [room]"},
    "policy_versions_used": 8,
    "staleness": {"histogram": {"0": 16, "2": 48}, "mean": 1.5, "max": 2, "bound": 4},
    "trained_to_taken": {"length": 0.9912, "reward": None},
    "ledger": {
        "generated": {"rollouts": 100, "tokens": 300},
        "trained": {"rollouts": 64, "tokens": 190},
        "masked": {"rollouts": 0, "tokens": 0},
        "buffered": {"rollouts": 20, "tokens": 60},
        "in_flight": {"rollouts": 8, "tokens": 25},
        "dropped": {"stale": {"rollouts": 8, "tokens": 25}},
    },
    "tokens": {"generate": 300, "score": 275, "train": 190},
    "weight_sync": {"transport": "shm", "count": 8, "p50_seconds": 0.0041, "bytes": 1000},
}


def status(**changes: object) -> dict[str, Any]:
    return {**copy.deepcopy(STATUS), **changes}


def test_a_plain_line_says_step_reward_staleness_queue_and_speed() -> None:
    line = plain_line(STATUS, {"generate": 1234.5})
    for said in (
        "step 7/40",
        "reward 0.44",
        "mean 1.50 max 2 of 4",
        "length 0.991, reward –",
        "queue 28",
        "generate 1,234 tok/s",
    ):
        assert said in line


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"doing": {"bootstrap-0": "warm start step 30"}}, "making the start model: warm start step 30"),
        ({"doing": {"bootstrap-0": "stopped", "evaluate-0": "starting"}}, "starting the stages"),
        ({}, "training"),
        ({"steps": 40}, "evaluating the trained model"),
        ({"steps": 20, "stop_at_step": 20}, "evaluating the trained model"),
        ({"steps": 20, "early_stop": "no better"}, "evaluating the trained model"),
        ({"state": "finished"}, "finished"),
        ({"state": "stopped"}, "stopped"),
    ],
)
def test_each_phase_of_a_campaign_has_its_words(changes: dict[str, Any], expected: str) -> None:
    assert phase(status(**changes)) == expected


def test_the_panel_shows_every_stage_that_is_alive_and_takes_nothing_for_markup() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(panel(STATUS, {"generate": 10.0}))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "waiting for [room]" in shown
    assert "train-0" in shown
    assert "bootstrap-0" not in shown


def test_the_figures_hold_the_ledger_and_the_accuracy() -> None:
    told = " ".join(value for _, value in figures(STATUS))
    for said in ("100 generated = 64 trained", "20 buffered + 8 in flight", "stale 8", "0.250 of 512", "0: 16  2: 48"):
        assert said in told


@pytest.mark.parametrize(("tokens", "said"), [(0, False), (48, True)])
def test_tokens_that_were_generated_twice_are_told_if_there_are_any(tokens: int, said: bool) -> None:
    ledger = {**STATUS["ledger"], "generated_twice": {"tokens": tokens}}
    told = " ".join(value for _, value in figures(status(ledger=ledger)))
    assert (f"{tokens} tokens were generated twice" in told) is said


SAMPLED: dict[str, Any] = {
    "accuracy": 0.5,
    "accuracy_interval": [0.4567, 0.5433],
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
    assert found["accuracy at end"] == "0.500 [0.457, 0.543] of 512 held-out prompts"
    assert found["sampled at end"] == ("pass@1 0.400 [0.370, 0.430], pass@2 0.600 [0.560, 0.640], majority of 2 2.250")
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
    assert found["hard at end"] == "0.125 [0.100, 0.150] of 64 prompts"
    assert found["early stop"] == "no better since version 20"


def test_each_evaluation_is_one_line_once_and_those_of_earlier_attempts_are_none() -> None:
    evaluated = Evaluated()
    later = {**EVALUATED, "policy_version": 40, "interval": None}
    assert evaluated.look(status(evaluations=[EVALUATED])) == []
    [line] = evaluated.look(status(evaluations=[EVALUATED, later]))
    assert line == "version 40: held-out accuracy 0.500 of 512 prompts; hard 0.125"
    assert evaluated.look(status(evaluations=[EVALUATED, later])) == []


def test_nothing_known_yet_is_shown_as_a_dash() -> None:
    young = status(reward_mean=None, staleness={"histogram": {}, "mean": None, "max": None, "bound": 4})
    assert "reward –" in plain_line(young, {})


def test_rates_are_tokens_between_two_looks_and_never_negative() -> None:
    rates = Rates()
    assert rates.look(STATUS) == {}
    later = rates.look(status(tokens={"generate": 400, "score": 275, "train": 0}))
    assert later["generate"] > 0
    assert later["score"] == 0
    assert later["train"] == 0, "a trainer that was rolled back"


def test_the_share_of_groups_without_spread_is_a_figure_once_it_is_known() -> None:
    assert "without spread" not in dict(figures(STATUS))
    found = dict(figures({**STATUS, "zero_advantage_share": 0.25}))
    assert found["without spread"] == "25% of the last groups have rewards that are all equal"


def test_the_curriculum_is_a_figure_if_there_is_one() -> None:
    assert "curriculum" not in dict(figures(STATUS))
    found = dict(figures({**STATUS, "curriculum": {"easy": 0.25, "hard": 0.1}}))
    assert found["curriculum"] == "25% of the prompts are easy, 10% are hard"


def test_masked_tokens_are_a_figure_once_there_are_any() -> None:
    assert "masked" not in dict(figures(STATUS))
    changed = status()
    changed["ledger"]["masked"] = {"rollouts": 7, "tokens": 19}
    assert dict(figures(changed))["masked"] == "19 tokens in 7 rollouts, 10.0% of those trained"


def test_control_characters_of_a_run_do_not_reach_the_terminal() -> None:
    hostile = {"run_id": "mine\x1b]0;title\x07", "doing": {"train-0\x1b[2J": "\x1b[31mtrain"}}
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    console.print(panel(STATUS | hostile, {}))
    shown = console.file.getvalue()
    assert "\x07" not in shown
    assert "\x1b]" not in shown
    assert r"\x1b[31mtrain" in shown
    assert "\x1b[2J" not in shown
