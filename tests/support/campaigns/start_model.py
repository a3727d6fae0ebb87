"""Makes a start model for campaigns of tests: `python -m support.campaigns.start_model FOLDER KEY=VALUE …`."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from configs.load import load_config
from configs.recipe import THREADS, choose_recipe
from configs.stored import DEFAULT_SOURCE
from millrace.bootstrap.tiny_model import Lesson, bootstrap
from millrace.prompts.dataset import load_prompts

_PRESET = Path(__file__).parents[3] / "configs" / "presets" / "tiny-cpu.yaml"


def make_start_model(folder: Path, sets: list[str], **changes: Any) -> None:
    """Makes the model as the bootstrap stage does for tiny-cpu, with these settings and `changes` of its recipe."""
    config = load_config(_PRESET, sets)
    recipe = replace(choose_recipe(config), **changes)
    lesson = Lesson(
        prompts=load_prompts(config.prompts).train, recipe=recipe, max_new_tokens=config.generation.max_new_tokens
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        bootstrap({DEFAULT_SOURCE: lesson}, recipe, folder, seed=config.seed, report=lambda step, line: None)
    finally:
        # A run that a later test trains and replays in this process needs the same number for both.
        torch.set_num_threads(threads)


if __name__ == "__main__":
    make_start_model(Path(sys.argv[1]), sys.argv[2:])
