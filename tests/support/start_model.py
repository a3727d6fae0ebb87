"""Makes the start model that quick campaigns share: `python -m support.start_model FOLDER SETTINGS-AS-JSON`."""

import json
import sys
from pathlib import Path

import torch

from configs.load import load_config
from millrace.bootstrap import TinyModel, bootstrap
from millrace.stages.inputs import load_prompt_set
from millrace.types import Sampling

_PRESET = Path(__file__).parents[2] / "configs" / "presets" / "tiny-cpu.yaml"


def main(folder: Path, settings: dict[str, object]) -> None:
    """As the bootstrap stage makes it."""
    config = load_config(_PRESET, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    shape = config.model.bootstrap
    torch.set_num_threads(shape.threads)
    bootstrap(
        load_prompt_set(config).train,
        TinyModel(**shape.model_dump(exclude={"threads"})),
        folder,
        seed=config.seed,
        sampling=Sampling(temperature=1.0, top_p=1.0, max_new_tokens=config.generation.max_new_tokens),
        report=lambda line: None,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
