"""Rewards, losses and advantages that can't be used: one sentence before any process starts, and no half-made run."""

from pathlib import Path

import pytest

from configs.load import load_config
from flows.campaign.prepare import check
from millrace.errors import InputError

PRESET = Path(__file__).parents[3] / "configs" / "presets" / "tiny-cpu.yaml"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["scoring.reward=telepathy"], 'scoring.reward is "telepathy"; expected one of exact_match, math, '),
        (
            ["scoring.reward=python", "scoring.function=tests.support.rewards.nowhere:f"],
            'scoring.function is "tests.support.rewards.nowhere:f"; expected a module that can be imported (Module',
        ),
        (
            ["scoring.reward=python", "scoring.function=tests.support.rewards.own_rewards:nothing"],
            'expected a function "nothing" in tests.support.rewards.own_rewards',
        ),
        (["scoring.reward=reward_model", "scoring.model=/no/such/model"], "scoring.model '/no/such/model': no config"),
        (
            ["scoring.reward=weighted_sum", "scoring.weights.maths=1.0"],
            'a name in scoring.weights is "maths"; expected one of ',
        ),
        (
            ["training.loss=my.nowhere:f"],
            'training.loss is "my.nowhere:f"; expected a module that can be imported (Mod',
        ),
        (
            ["training.advantage=tests.support.training.own_functions:one_group"],
            "which can't be used: of the batch it returned 1 values; expected 2, one per group",
        ),
    ],
)
def test_a_function_that_can_not_be_used_is_one_sentence(tmp_path: Path, settings: list[str], expected: str) -> None:
    config = load_config(PRESET, [*settings, f"storage.root={tmp_path / 'runs'}"])
    with pytest.raises(InputError) as caught:
        check(config, "run", resume="never")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_function_of_ones_own_that_can_be_called_is_let_through(tmp_path: Path) -> None:
    own = "tests.support.training.own_functions"
    settings = ["scoring.reward=python", "scoring.function=tests.support.rewards.own_rewards:length"]
    settings += [f"training.loss={own}:capped", f"training.advantage={own}:better_than_half"]
    check(load_config(PRESET, [*settings, f"storage.root={tmp_path / 'runs'}"]), "run", resume="never")
