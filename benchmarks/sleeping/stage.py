"""A stage that sleeps instead of computing: `python -m benchmarks.sleeping.stage STAGE`, with a stage's arguments.

generate   a sleeping engine, or the configured one with a meter      evaluate   an engine that answers at once
train      a trainer that sleeps, once the other stages are ready     others     as in any campaign
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.sleeping.engine import SleepingEngine
from benchmarks.sleeping.metered_engine import MeteredEngine, MeterReading
from benchmarks.sleeping.pace import AGREED_LOGPROBS, SleepingPace
from configs.generation import GenerationConfig
from millrace.generation.engines.base import Engine
from millrace.generation.engines.factory import make_engine
from millrace.runtime.entry import run_stage
from millrace.runtime.stage import Stage
from millrace.stages import evaluate, generate
from millrace.stages.train import main as train
from millrace.training.batch import Sample
from millrace.training.step_report import StepReport
from millrace.training.trainer import Trainer
from millrace.types import Sampling
from millrace.weights.base import WeightsId
from storage.progress import read_status

SLOT_SECONDS = "slot_seconds"
"""Name of a metric: the time that the engine's slots were in use until it got the version, summed over slots."""
METER = "meter/"
"""Prefix of the metrics that hold readings of a metered engine."""


class SleepingTrainer(Trainer):
    """A real policy that never changes: hashed, sent and checkpointed as usual, with a new version after each sleep."""

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        return dict(AGREED_LOGPROBS)

    def step(self, samples: Sequence[Sample], rate_factor: float = 1.0) -> StepReport:
        time.sleep(SleepingPace.from_environment().train_seconds)
        self.policy_version += 1
        return StepReport(
            loss=0.0,
            grad_norm=0.0,
            learning_rate=0.0,
            updates=1,
            importance_ratio_mean=1.0,
            importance_ratio_p05=1.0,
            importance_ratio_p50=1.0,
            importance_ratio_p95=1.0,
            importance_ratio_max=1.0,
            clip_fraction=0.0,
            effective_sample_size=1.0,
            ratio_effective_sample_size=1.0,
            weight_mean=1.0,
            weight_max=1.0,
            mismatch_kl=0.0,
            chi_square=0.0,
            kl_to_reference=0.0,
            kl_to_teacher=0.0,
            forward_kl_to_teacher=0.0,
            entropy=0.0,
            tokens=len(samples),
            non_finite_tokens=0,
            changed_weight_share=1.0,
            trainer_logprobs=[sample.rollout_logprobs for sample in samples],
            trainer_entropies=[-sample.rollout_logprobs for sample in samples],
        )


def train_when_others_are_ready(stage: Stage) -> None:
    """Runs the train stage once all other stages are ready.

    Otherwise rollouts generated while the scorer was starting would be waiting at the first step, and the next steps
    would be faster than the slowest stage.
    """

    def others_ready() -> bool:
        stages = ("generate", "score", "sync_weights")
        return all(read_status(stage.store, name, 0).get("t_ready") is not None for name in stages)

    if stage.wait(others_ready, why="waiting until every other stage is ready"):
        train.main(stage)


def generate_at_pace(stage: Stage) -> None:
    """Runs the generate stage with an engine of the benchmark's pace, which writes its figures among the metrics."""
    pace = SleepingPace.from_environment()

    def log_update(weights: WeightsId, slot_seconds: float) -> None:
        values = {SLOT_SECONDS: slot_seconds}
        stage.metrics.log(incarnation=weights.incarnation, policy_version=weights.policy_version, **values)

    def log_reading(reading: MeterReading) -> None:
        values = {f"{METER}{name}": value for name, value in asdict(reading).items()}
        stage.metrics.log(incarnation=0, policy_version=0, **values)

    def make(
        config: GenerationConfig,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dtype: str,
        samplings: Sequence[Sampling],
        **options: object,
    ) -> Engine:
        """Replaces `make_engine`."""
        if pace.real_engine:
            engine = make_engine(config, folder, tokenizer, dtype=dtype, samplings=samplings)
            return MeteredEngine(engine, pace, log_reading)
        ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
        return SleepingEngine(pace, updated=log_update, **ids)

    with patch.object(generate, "make_engine", make):
        generate.main(stage)


def make_instant_engine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options: object) -> Engine:
    """Replaces `TransformersEngine`. An untrained policy would sample up to the longest response."""
    return SleepingEngine(SleepingPace(slots=1), vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)


def main(name: str) -> None:
    """Runs the stage."""
    if name == "generate":
        run_stage(name, generate_at_pace)
    elif name == "evaluate":
        with patch.object(evaluate, "TransformersEngine", make_instant_engine):
            run_stage(name, evaluate.main)
    else:
        with patch.object(train, "Trainer", SleepingTrainer):
            run_stage(name, train_when_others_are_ready)


if __name__ == "__main__":
    main(sys.argv.pop(1))
