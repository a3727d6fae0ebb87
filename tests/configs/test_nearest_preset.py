"""The preset that a config is closest to."""

import pytest

from configs.load import PRESETS, load_config, nearest_preset


@pytest.mark.parametrize("name", [file.stem for file in PRESETS.glob("*.yaml")])
def test_a_preset_is_nearest_to_itself(name: str) -> None:
    assert nearest_preset(load_config(PRESETS / f"{name}.yaml")) == (name, {})


def test_settings_that_differ_have_both_values_except_name_and_root() -> None:
    overrides = ["training.max_steps=12", "scoring.replicas=2", "name=mine", "storage.root=/tmp/mine"]
    preset, changes = nearest_preset(load_config(PRESETS / "smollm2-cpu.yaml", overrides))
    assert (preset, changes) == ("smollm2-cpu", {"scoring.replicas": [1, 2], "training.max_steps": [30, 12]})
