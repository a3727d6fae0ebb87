"""The bootstrap stage: the run's own start model, made once, before anything else of the run.

training prompts ─► tiny model, warm-started ─► start/ in the run, whole or not at all
"""

import shutil
import tempfile
from pathlib import Path

import torch

from millrace.bootstrap import TinyModel, bootstrap
from millrace.model import start_folder
from millrace.stages.inputs import load_prompt_set
from millrace.stages.process import Stage, run_stage
from millrace.types import Sampling


def main(stage: Stage) -> None:
    """Makes the model; one that an earlier attempt made is kept."""
    config = stage.config
    folder = start_folder(stage.store, None)
    if folder.exists():
        return
    shape = config.model.bootstrap
    torch.set_num_threads(shape.threads)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tmp-") as temporary:
        made = Path(temporary) / "start"
        result = bootstrap(
            load_prompt_set(config).train,
            TinyModel(**shape.model_dump(exclude={"threads"})),
            made,
            seed=config.seed,
            sampling=Sampling(temperature=1.0, top_p=1.0, max_new_tokens=config.generation.max_new_tokens),
            report=stage.say,
        )
        shutil.move(made, folder)
    stage.milestone(
        f"start model of {result.parameters:,} parameters made in {result.seconds:.0f} s and {result.steps} supervised "
        f"steps: right on {result.accuracy:.0%} of training prompts, greedily"
    )


if __name__ == "__main__":
    run_stage("bootstrap", main)
