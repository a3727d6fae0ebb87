"""Checks of a campaign before it starts, and the config of the short form."""

import json
import typing
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.load import PRESETS, load_config
from flows.campaign.from_preset import Preset, preset_config
from flows.campaign.prepare import check
from millrace.errors import InputError, PromptsError

PRESET = PRESETS / "tiny-cpu.yaml"
ROWS = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(20)]
FUNCTIONS = "tests.support.training.own_functions"


@pytest.mark.parametrize(
    "settings",
    [
        ["scoring.reward=telepathy"],
        ["scoring.reward=tests.support.rewards.nowhere:f"],
        ["scoring.reward=reward_model", "scoring.model=/no/such/model"],
        ["training.loss=my.nowhere:f"],
        [f"training.advantage={FUNCTIONS}:one_group"],
    ],
)
def test_an_unusable_function_is_a_user_error(tmp_path: Path, settings: list[str]) -> None:
    config = load_config(PRESET, [*settings, f"storage.root={tmp_path / 'runs'}"])
    with pytest.raises(InputError):
        check(config, "run", resume="never")
    assert not (tmp_path / "runs").exists()


def test_a_users_functions_pass_the_check(tmp_path: Path) -> None:
    settings = ["scoring.reward=tests.support.rewards.own_rewards:length"]
    settings += [f"training.loss={FUNCTIONS}:capped", f"training.advantage={FUNCTIONS}:better_than_half"]
    check(load_config(PRESET, [*settings, f"storage.root={tmp_path / 'runs'}"]), "run", resume="never")


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"id": "own"}], ids=["no id", "an id"])
@pytest.mark.parametrize(
    "settings", [["scoring.reward=math"], ["scoring.reward=weighted_sum", "scoring.weights.math=1"]]
)
def test_a_prompt_with_an_unusable_answer_is_named(tmp_path: Path, settings: list[str], more: dict[str, str]) -> None:
    rows = [*ROWS, {"prompt": "Why?", "answer": "I don't know", **more}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    root = tmp_path / "runs"
    sources = [f"prompts.source={file}", "prompts.num_eval=2", f"storage.root={root}"]
    with pytest.raises(PromptsError) as caught:
        check(load_config(PRESET, [*settings, *sources]), "run", resume="never")
    assert caught.value.file == f"prompt {more.get('id', 'prompts.jsonl:21')} of prompts.jsonl"
    assert not root.exists()


@pytest.mark.parametrize("preset", typing.get_args(Preset))
def test_an_empty_form_is_the_preset(preset: Preset) -> None:
    assert preset_config(preset, {"name": None, "model.path": None}, []) == load_config(PRESETS / f"{preset}.yaml")


def test_the_form_offers_every_preset() -> None:
    assert set(typing.get_args(Preset)) == {file.stem for file in PRESETS.glob("*.yaml")}


def test_fields_change_the_preset_and_advanced_wins_over_them() -> None:
    fields = {"name": "mine", "training.max_steps": 7, "training.learning_rate": 1e-05, "scoring.reward": None}
    config = preset_config("tiny-cpu", fields, ["training.max_steps=9", "storage.root=s3://bucket/runs"])
    assert (config.name, config.training.max_steps, config.training.learning_rate) == ("mine", 9, 1e-05)
    assert config.storage.root == "s3://bucket/runs"


def test_a_wrong_setting_of_the_form_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        preset_config("tiny-cpu", {}, ["training.max_stepz=9"])
    assert (caught.value.file, caught.value.key) == ("the form", "training.max_stepz")
