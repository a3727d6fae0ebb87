"""The generate stage with a metered engine: `python -m benchmarks.engine_share.generate`, with a stage's arguments."""

from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

from transformers import PreTrainedTokenizerBase

from benchmarks.engine_share.metered import MeteredEngine, Reading
from benchmarks.sleeping.pace import Pace
from configs.generation import GenerationConfig
from millrace.generation.engines.base import Engine
from millrace.generation.engines.factory import make_engine
from millrace.runtime.stage import Stage, run_stage
from millrace.stages import generate

METER = "meter/"
"""Prefix of the metrics that hold readings of the engine's meter."""


def main(stage: Stage) -> None:
    """The generate stage; the readings are among its metrics."""

    def record(reading: Reading) -> None:
        values = {f"{METER}{name}": value for name, value in asdict(reading).items()}
        stage.metrics.log(incarnation=0, policy_version=0, **values)

    def make_metered(
        config: GenerationConfig, folder: Path, tokenizer: PreTrainedTokenizerBase, *, dtype: str, **how: object
    ) -> Engine:
        tail = Pace.from_environment().long_tail
        assert tail is not None
        return MeteredEngine(make_engine(config, folder, tokenizer, dtype=dtype), tail, record)

    with patch.object(generate, "make_engine", make_metered):
        generate.main(stage)


if __name__ == "__main__":
    run_stage("generate", main)
