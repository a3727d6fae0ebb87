"""The preset that a config is closest to, and its settings that differ from the defaults."""

import pytest

from configs.load import PRESETS, SUPERVISED, changed_defaults, load_config, nearest_preset
from configs.schema import RunConfig


@pytest.mark.parametrize("name", [file.stem for file in PRESETS.glob("*.yaml")])
def test_a_preset_is_nearest_to_itself(name: str) -> None:
    assert nearest_preset(load_config(PRESETS / f"{name}.yaml")) == (name, {})


def test_settings_that_differ_have_both_values_except_name_and_root() -> None:
    overrides = ["training.max_steps=12", "scoring.replicas=2", "name=mine", "storage.root=/tmp/mine"]
    preset, changes = nearest_preset(load_config(PRESETS / "smollm2-cpu.yaml", overrides))
    assert (preset, changes) == ("smollm2-cpu", {"scoring.replicas": [1, 2], "training.max_steps": [30, 12]})


def test_a_setting_that_differs_has_its_default_if_there_is_one() -> None:
    config = RunConfig.model_validate({"training": {"max_steps": 12}, "scoring": {"replicas": 2}, "name": "mine"})
    assert changed_defaults(config) == {"name": ["campaign"], "scoring.replicas": [1], "training.max_steps": []}


def test_settings_that_make_a_config_one_of_supervised_fine_tuning_do_not_count() -> None:
    overrides = [*SUPERVISED, "prompts.source=answers.jsonl", "model.path=models/mine", "training.max_steps=7"]
    preset, changes = nearest_preset(load_config(PRESETS / "tiny-cpu.yaml", overrides))
    assert (preset, set(changes)) == ("tiny-cpu", {"model.path", "prompts.source", "training.max_steps"})
