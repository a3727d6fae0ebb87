"""The short form of a campaign: a preset, what people change first, and any other setting by its key."""

import typing

import pytest

from configs.errors import ConfigError
from configs.load import PRESETS, load_config
from flows.campaign.from_preset import Preset, config_of


def test_the_form_offers_every_preset() -> None:
    assert set(typing.get_args(Preset)) == {file.stem for file in PRESETS.glob("*.yaml")}


@pytest.mark.parametrize("preset", typing.get_args(Preset))
def test_a_form_with_nothing_filled_in_is_the_preset(preset: str) -> None:
    assert config_of(preset, {"name": None, "model.path": None}, []) == load_config(PRESETS / f"{preset}.yaml")


def test_fields_change_the_preset_and_advanced_wins_over_them() -> None:
    fields = {"name": "mine", "training.max_steps": 7, "training.learning_rate": 1e-05, "scoring.reward": None}
    config = config_of("tiny-cpu", fields, ["training.max_steps=9", "storage.root=s3://bucket/runs"])
    assert config.name == "mine"
    assert config.training.max_steps == 9
    assert config.training.learning_rate == 1e-05
    assert config.storage.root == "s3://bucket/runs"


def test_a_wrong_setting_is_named_as_one_of_the_form() -> None:
    with pytest.raises(ConfigError) as caught:
        config_of("tiny-cpu", {}, ["training.max_stepz=9"])
    assert (caught.value.file, caught.value.key) == ("the form", "training.max_stepz")
