"""Makes a start model for campaigns of tests: `python -m support.campaigns.start_model FOLDER KEY=VALUE …`."""

import sys
from pathlib import Path

import torch

from configs.load import load_config
from millrace.bootstrap.tiny_model import bootstrap
from millrace.prompts.dataset import load_prompts

_PRESET = Path(__file__).parents[3] / "configs" / "presets" / "tiny-cpu.yaml"


def make_start_model(folder: Path, sets: list[str]) -> None:
    """Makes the model as the bootstrap stage does for the preset tiny-cpu with these settings."""
    config = load_config(_PRESET, sets)
    shape = config.model.bootstrap
    torch.set_num_threads(shape.threads)
    bootstrap(
        load_prompts(config.prompts).train,
        shape,
        folder,
        seed=config.seed,
        max_new_tokens=config.generation.max_new_tokens,
        report=lambda step, line: None,
    )


if __name__ == "__main__":
    make_start_model(Path(sys.argv[1]), sys.argv[2:])
