"""Makes the start model that quick campaigns share.

`python -m support.campaigns.start_model FOLDER SETTINGS-AS-JSON`
"""

import json
import sys
from pathlib import Path

import torch

from configs.load import load_config
from configs.recipe import THREADS, choose_recipe
from millrace.bootstrap.tiny_model import bootstrap
from millrace.prompts.dataset import load_prompts

_PRESET = Path(__file__).parents[3] / "configs" / "presets" / "tiny-cpu.yaml"


def main(folder: Path, settings: dict[str, object]) -> None:
    """Makes the model as the bootstrap stage does."""
    config = load_config(_PRESET, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    torch.set_num_threads(THREADS)
    bootstrap(
        load_prompts(config.prompts).train,
        choose_recipe(config),
        folder,
        seed=config.seed,
        max_new_tokens=config.generation.max_new_tokens,
        report=lambda step, line: None,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
