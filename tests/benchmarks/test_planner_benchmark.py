"""Configs that the planner predicts on this machine."""

import json
from pathlib import Path

import pytest
from support.planning.timed_run import Times, write_timed_run

from benchmarks.harness import PRESET, as_settings
from benchmarks.planner import FAMILIES, FITTED, PREDICTED, PlannerCase, figures, write_prompts
from configs.load import load_config
from storage.stores.local import LocalStore


def _settings(case: PlannerCase) -> list[str]:
    return as_settings({**FAMILIES[case.family], **case.settings})


@pytest.mark.parametrize("case", [*FITTED, *PREDICTED], ids=lambda case: case.name)
def test_each_case_is_a_config_that_can_run(case: PlannerCase) -> None:
    assert load_config(PRESET, _settings(case)).training.max_steps >= 40


def test_no_predicted_config_is_one_that_was_fitted() -> None:
    configs = [load_config(PRESET, _settings(case)) for case in (*FITTED, *PREDICTED) if case.family != "longer"]
    assert len({config.model_dump_json() for config in configs}) == len(configs)
    assert len(PREDICTED) >= 12


def test_prompts_have_the_given_number_of_letters(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", 7)
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(set("".join(prompts))) == 7
    assert len(set(prompts)) == len(prompts)


@pytest.mark.slow
def test_figures_are_those_of_the_steps_after_the_warm_up(tmp_path: Path) -> None:
    generation = ["generation.group_size=4", "generation.groups_per_batch=8", "generation.max_new_tokens=40"]
    config = load_config(PRESET, [*generation, "training.groups_per_step=8"])
    times = Times(train_step=0.5, train_token=0.0, handover=0.1, overhead_rollout=0.0)
    write_timed_run(LocalStore(tmp_path), config, lambda group, sample: 40, times, steps=40)
    measured = figures(tmp_path)
    assert measured["step_seconds"] == pytest.approx(0.6)
    assert measured["idle_train"] == 0
    assert measured["dropped_share"] == 0
