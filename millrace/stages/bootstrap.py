"""The bootstrap stage: makes the run's own start model once, before any other stage runs.

training prompts ─► tiny model, warm-started ─► start/ in the run, all or nothing
"""

import tempfile
from pathlib import Path

import torch

from configs.recipe import THREADS, choose_recipe
from millrace.bootstrap.tiny_model import Lesson, bootstrap
from millrace.models.start_folder import store_start_model
from millrace.prompts.dataset import load_all_prompts
from millrace.runtime.entry import run_stage
from millrace.runtime.stage import Stage
from storage import layout
from storage.failpoints import failpoint


def main(stage: Stage) -> None:
    """Makes the model, unless an earlier attempt did."""
    config = stage.config
    if stage.store.exists(layout.START_MANIFEST):
        return
    recipe = choose_recipe(config)
    prompts = load_all_prompts(config.by_source())
    lessons = {
        name: Lesson(
            prompts=prompts[name].train,
            recipe=choose_recipe(source),
            max_new_tokens=source.generation.max_new_tokens,
            environment=source.environment,
        )
        for name, source in config.by_source().items()
    }

    def report(step: int, progress: str) -> None:
        stage.update_status(step=step)
        stage.set_activity(progress)
        stage.log(progress)

    stage.log(f"making the start model: at most {recipe.max_steps:,} supervised steps")
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / "start"
        stage.update_status(step=0, most_steps=recipe.max_steps)
        stage.set_activity(f"warm start step 0 of at most {recipe.max_steps}")
        summary = bootstrap(lessons, recipe, made, seed=config.seed, report=report, on_progress=stage.advance)
        failpoint("bootstrap.before_store")
        store_start_model(stage.store, made)
    stage.log(f"start model: {summary}")


if __name__ == "__main__":
    run_stage("bootstrap", main)
