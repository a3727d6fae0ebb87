"""The tiny start model suits the prompts and the engine."""

import pytest

from configs.load import PRESETS, load_config
from configs.recipe import choose_recipe


@pytest.mark.parametrize(
    ("preset", "settings", "layers", "hidden_size", "target", "max_accuracy", "max_steps"),
    [
        ("tiny-cpu", [], 3, 64, 0.98, 0.38, 2000),
        ("tiny-cpu", ["model.warm_start_steps=10"], 3, 64, 0.98, 0.38, 10),
        # The carry of sums of one digit can't be wrong, so their accuracy can't stay low.
        ("tiny-cpu", ["prompts.digits=1", "prompts.num_eval=9"], 3, 64, 0.2, 1.0, 150),
        ("tiny-vllm-cpu", [], 3, 96, 0.98, 0.38, 2000),
        ("calculator-cpu", [], 2, 64, 0.85, 0.45, 1000),
        ("chain-cpu", [], 2, 64, 0.8, 1.0, 800),
        ("reasoning-gym-cpu", [], 3, 64, 0.08, 1.0, 100),
        ("gsm8k-cpu", [], 3, 64, 0.2, 1.0, 150),
        # That of the sums, whose warm start is the longest.
        ("mixture-cpu", [], 3, 64, 0.98, 0.38, 2000),
    ],
)
def test_a_recipe_suits_the_prompts_and_the_engine(
    preset: str,
    settings: list[str],
    layers: int,
    hidden_size: int,
    target: float,
    max_accuracy: float,
    max_steps: int,
) -> None:
    recipe = choose_recipe(load_config(PRESETS / f"{preset}.yaml", settings))
    assert (recipe.num_layers, recipe.hidden_size) == (layers, hidden_size)
    assert (recipe.target_imitation_rate, recipe.max_accuracy) == (target, max_accuracy)
    assert recipe.max_steps == max_steps
