"""The train stage, whose trainer sleeps: `python -m benchmarks.sleeping.train`, with a stage's arguments.

It begins once the others are ready. Else what a generator has made while the scorer was still starting would be there
at the first step, and the steps after it would come faster than the slowest stage works.
"""

import time
from collections.abc import Sequence
from unittest.mock import patch

from benchmarks.sleeping.pace import AGREED_LOGPROBS, Pace
from millrace.batch import Sample
from millrace.stages import train
from millrace.stages.process import Stage, run_stage
from millrace.step_report import StepReport
from millrace.trainer import Trainer
from storage.progress import read_life

_OTHERS = ("generate", "score", "sync_weights")


class SleepingTrainer(Trainer):
    """A real policy that never changes: hashed, sent and checkpointed as any, and a new version after each sleep."""

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        return dict(AGREED_LOGPROBS)

    def step(self, samples: Sequence[Sample]) -> StepReport:
        time.sleep(Pace.from_environment().train)
        self.policy_version += 1
        return StepReport(
            loss=0.0,
            grad_norm=0.0,
            importance_ratio_mean=1.0,
            importance_ratio_p05=1.0,
            importance_ratio_p50=1.0,
            importance_ratio_p95=1.0,
            importance_ratio_max=1.0,
            clip_fraction=0.0,
            effective_sample_size=1.0,
            weight_mean=1.0,
            weight_max=1.0,
            mismatch_kl=0.0,
            chi_square=0.0,
            kl_to_reference=0.0,
            entropy=0.0,
            tokens=len(samples),
            trainer_logprobs=[sample.rollout_logprobs for sample in samples],
        )


def main(stage: Stage) -> None:
    """As the train stage, from when nobody else is still starting."""

    def others_ready() -> bool:
        return all(read_life(stage.store, name, 0).get("t_ready") is not None for name in _OTHERS)

    if stage.wait(others_ready, why="waiting until every other stage is ready"):
        train.main(stage)


if __name__ == "__main__":
    with patch.object(train, "Trainer", SleepingTrainer):
        run_stage("train", main)
