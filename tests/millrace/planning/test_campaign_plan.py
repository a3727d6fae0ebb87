"""A plan: its figures, and the config that it makes."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.planning.small_machine import SmallMachine

from configs.load import load_config
from configs.schema import RunConfig
from flows.operations.planning import write_config
from millrace.errors import InputError
from millrace.planning.plan import Plan, what_if
from millrace.planning.search import make_plan, simulator

PRESET = Path(__file__).parents[3] / "configs" / "presets" / "qwen3-8b-8gpu.yaml"
SMALL = [
    "training.groups_per_step=16",
    "training.parallel.data=1",
    "training.activation_checkpointing=false",
    "generation.replicas=1",
    "generation.group_size=4",
    "generation.max_new_tokens=128",
]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    limits = ["supervision.hang_seconds=70", "weights.deadline_seconds=30"]
    return load_config(PRESET, [*SMALL, "generation.groups_per_batch=16", *limits])


@pytest.fixture(scope="module")
def plan(config: RunConfig) -> Plan:
    return make_plan(config, SmallMachine(), simulator(10), gpus=8, goal="fastest", dollars_per_gpu_hour=2.0)


def test_the_written_config_loads_with_its_prediction(plan: Plan, tmp_path: Path) -> None:
    write_config(plan, tmp_path / "plan.yaml")
    loaded = load_config(tmp_path / "plan.yaml")
    assert loaded == plan.config()
    assert plan.chosen.outcome is not None
    assert f"Predicted: {plan.chosen.outcome.step_seconds:.4g} s per step" in (tmp_path / "plan.yaml").read_text()
    assert loaded.training.parallel == plan.chosen.config.training.parallel


def test_the_written_config_has_explicit_settings_and_no_defaults(plan: Plan, tmp_path: Path) -> None:
    write_config(plan, tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    assert text.startswith("# Made by `millrace plan`: qwen3-8b-8gpu: ")
    assert "entropy_coefficient" not in text
    assert "answer_format: boxed" in text


def test_a_stage_may_be_silent_for_longer_than_a_planned_step(config: RunConfig) -> None:
    slow = SmallMachine(extra={"overhead": 50.0})
    made = make_plan(config, slow, simulator(10), gpus=2, goal="fastest")
    assert made.chosen.outcome is not None
    assert made.config().supervision.hang_seconds >= 3 * made.chosen.outcome.step_seconds


def test_the_price_is_that_of_the_gpus_in_use(plan: Plan) -> None:
    assert plan.chosen.gpus == 8
    assert plan.dollars(plan.chosen, 3600.0) == 16.0


def test_a_plan_is_plain_json(plan: Plan) -> None:
    content = json.loads(json.dumps(plan.to_json()))
    assert content["entries"][0]["outcome"]["step_seconds"] > 0
    assert content["changes"]["training.parallel.data"] == plan.config().training.parallel.data
    assert {entry["reason"] for entry in content["entries"][1:]} != {""}


def compare(config: RunConfig, key: str, value: Any, machine: SmallMachine) -> Plan:
    after = load_config(PRESET, [*SMALL, "generation.groups_per_batch=16", f"{key}={value}"])
    return what_if(config, after, {key: value}, machine, simulator(10))


def test_a_what_if_compares_the_config_with_its_change(config: RunConfig) -> None:
    made = compare(config, "training.parallel.data", 4, SmallMachine())
    former, changed = (entry.outcome for entry in made.entries)
    assert former is not None
    assert changed is not None
    assert former.step_seconds > 1.5 * changed.step_seconds
    assert made.is_what_if
    assert made.config().training.parallel.data == 4


def test_a_what_if_that_does_not_fit_is_not_written(config: RunConfig, tmp_path: Path) -> None:
    made = compare(config, "training.parallel.data", 1, SmallMachine(trainer_gib=300.0))
    assert made.chosen.outcome is None
    assert "does not fit: the trainer needs 300 GiB" in made.chosen.reason
    with pytest.raises(InputError):
        write_config(made, tmp_path / "plan.yaml")
    assert not (tmp_path / "plan.yaml").exists()
