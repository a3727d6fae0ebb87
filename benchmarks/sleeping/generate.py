"""The generate stage, whose engine sleeps: `python -m benchmarks.sleeping.generate`, with a stage's arguments."""

from pathlib import Path
from unittest.mock import patch

from transformers import PreTrainedTokenizerBase

from benchmarks.sleeping.engines import LongTailEngine, SleepingEngine
from benchmarks.sleeping.pace import Pace
from millrace.generation.engines.base import Engine
from millrace.runtime.stage import Stage, run_stage
from millrace.stages import generate
from millrace.weights.base import WeightsId

PLACE_SECONDS = "place_seconds"
"""Name of a metric: the time that the engine's places were taken until it got the version, summed over places."""


def main(stage: Stage) -> None:
    """The generate stage with an engine of the benchmark's pace."""

    def log(weights: WeightsId, place_seconds: float) -> None:
        stage.metrics.log(
            incarnation=weights.incarnation,
            policy_version=weights.policy_version,
            **{PLACE_SECONDS: place_seconds},
        )

    def make_engine(config: object, folder: Path, tokenizer: PreTrainedTokenizerBase, **how: object) -> Engine:
        """In place of `millrace.generation.engines.factory.make_engine`."""
        pace = Pace.from_environment()
        ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
        if pace.long_tail is not None:
            return LongTailEngine(pace.long_tail, updated=log, **ids)
        return SleepingEngine(seconds=pace.generate / pace.rollouts_per_step, **ids)

    with patch.object(generate, "make_engine", make_engine):
        generate.main(stage)


if __name__ == "__main__":
    run_stage("generate", main)
