"""Rewards, losses and advantages that can't be used: one sentence before any process starts, and no half-made run."""

import json
from pathlib import Path

import pytest

from configs.load import load_config
from flows.campaign.prepare import check
from millrace.errors import InputError

PRESET = Path(__file__).parents[3] / "configs" / "presets" / "tiny-cpu.yaml"


@pytest.mark.parametrize(
    "settings",
    [
        ["scoring.reward=telepathy"],
        ["scoring.reward=tests.support.rewards.nowhere:f"],
        ["scoring.reward=reward_model", "scoring.model=/no/such/model"],
        ["training.loss=my.nowhere:f"],
        ["training.advantage=tests.support.training.own_functions:one_group"],
    ],
)
def test_a_function_that_can_not_be_used_is_refused_in_one_line(tmp_path: Path, settings: list[str]) -> None:
    config = load_config(PRESET, [*settings, f"storage.root={tmp_path / 'runs'}"])
    with pytest.raises(InputError) as caught:
        check(config, "run", resume="never")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


ROWS = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(20)]


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"id": "own"}], ids=["no id", "an id"])
@pytest.mark.parametrize(
    "settings", [["scoring.reward=math"], ["scoring.reward=weighted_sum", "scoring.weights.math=1"]]
)
def test_a_prompt_whose_answer_the_reward_can_not_use_is_named_with_its_line(
    tmp_path: Path, settings: list[str], more: dict[str, str]
) -> None:
    rows = [*ROWS, {"prompt": "Why?", "answer": "I don't know", **more}]
    file = tmp_path / "asked.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    root = tmp_path / "runs"
    sources = [f"prompts.source={file}", "prompts.num_eval=2", f"storage.root={root}"]
    with pytest.raises(InputError) as caught:
        check(load_config(PRESET, [*settings, *sources]), "run", resume="never")
    assert str(caught.value).startswith(f"{file} line 21: ")
    assert not root.exists()


def test_a_function_of_ones_own_that_can_be_called_is_let_through(tmp_path: Path) -> None:
    own = "tests.support.training.own_functions"
    settings = ["scoring.reward=tests.support.rewards.own_rewards:length"]
    settings += [f"training.loss={own}:capped", f"training.advantage={own}:better_than_half"]
    check(load_config(PRESET, [*settings, f"storage.root={tmp_path / 'runs'}"]), "run", resume="never")
