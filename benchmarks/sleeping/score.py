"""The score stage, whose reward sleeps: `python -m benchmarks.sleeping.score`, with a stage's arguments."""

import time
from unittest.mock import patch

from benchmarks.sleeping.pace import Pace
from configs.prompts import PromptsConfig
from configs.scoring import ScoringConfig
from millrace.rewards.base import Reward, Score
from millrace.rewards.scorer import Scorer
from millrace.runtime.stage import run_stage
from millrace.stages import score
from millrace.types import Prompt


class SleepingReward(Reward):
    """1 for every response, after a sleep."""

    name = "sleeping"
    version = "1"

    def __init__(self, seconds: float) -> None:
        """`seconds` is the sleep per response."""
        self._seconds = seconds

    def score(self, prompt: Prompt, response: str) -> Score:
        time.sleep(self._seconds)
        return Score(reward=1.0)


def make_sleeping_scorer(scoring: ScoringConfig, prompts: PromptsConfig) -> Scorer:
    """In place of `millrace.rewards.scorer.make_scorer`."""
    pace = Pace.from_environment()
    return Scorer(SleepingReward(pace.score / pace.rollouts_per_step))


if __name__ == "__main__":
    with patch.object(score, "make_scorer", make_sleeping_scorer):
        run_stage("score", score.main)
