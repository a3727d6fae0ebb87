"""The bootstrap stage: the run's own start model, made once, before anything else of the run.

training prompts ─► tiny model, warm-started ─► start/ in the run, whole or not at all
"""

import tempfile
from pathlib import Path

import torch

from millrace.bootstrap import TinyModel, bootstrap
from millrace.environments.factory import environment_class
from millrace.model import store_start_model
from millrace.stages.inputs import load_prompt_set
from millrace.stages.process import Stage, run_stage
from millrace.types import Sampling
from storage import layout
from storage.failpoints import failpoint


def main(stage: Stage) -> None:
    """Makes the model; one that an earlier attempt made is kept."""
    config = stage.config
    if stage.store.exists(layout.START_MANIFEST):
        return
    shape = config.model.bootstrap
    torch.set_num_threads(shape.threads)
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / "start"
        result = bootstrap(
            load_prompt_set(config).train,
            TinyModel(**shape.model_dump(exclude={"threads"})),
            made,
            seed=config.seed,
            sampling=Sampling(temperature=1.0, top_p=1.0, max_new_tokens=config.generation.max_new_tokens),
            report=stage.say,
            environment=environment_class(config.environment.name),
            max_turns=config.environment.max_turns,
        )
        failpoint("bootstrap.before_store")
        store_start_model(stage.store, made)
    stage.milestone(
        f"start model of {result.parameters:,} parameters made in {result.seconds:.0f} s and {result.steps} supervised "
        f"steps: right on {result.accuracy:.0%} of training prompts, greedily"
    )


if __name__ == "__main__":
    run_stage("bootstrap", main)
