"""The train stage, whose trainer sleeps: `python -m benchmarks.sleeping.train`, with a stage's arguments.

It begins once the other stages are ready. Otherwise, rollouts generated while the scorer was starting would be waiting
at the first step, and the next steps would be faster than the slowest stage.
"""

import time
from collections.abc import Sequence
from unittest.mock import patch

from benchmarks.sleeping.pace import AGREED_LOGPROBS, Pace
from millrace.runtime.stage import Stage, run_stage
from millrace.stages.train import main as train
from millrace.training.batch import Sample
from millrace.training.step_report import StepReport
from millrace.training.trainer import Trainer
from storage.progress import read_status

_OTHERS = ("generate", "score", "sync_weights")


class SleepingTrainer(Trainer):
    """A real policy that never changes: hashed, sent and checkpointed as usual, with a new version after each sleep."""

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        return dict(AGREED_LOGPROBS)

    def step(self, samples: Sequence[Sample], rate_factor: float = 1.0) -> StepReport:
        time.sleep(Pace.from_environment().train)
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
            entropy=0.0,
            tokens=len(samples),
            non_finite_tokens=0,
            changed_weight_share=1.0,
            trainer_logprobs=[sample.rollout_logprobs for sample in samples],
        )


def main(stage: Stage) -> None:
    """The train stage, delayed until all other stages are ready."""

    def others_ready() -> bool:
        return all(read_status(stage.store, name, 0).get("t_ready") is not None for name in _OTHERS)

    if stage.wait(others_ready, why="waiting until every other stage is ready"):
        train.main(stage)


if __name__ == "__main__":
    with patch.object(train, "Trainer", SleepingTrainer):
        run_stage("train", main)
