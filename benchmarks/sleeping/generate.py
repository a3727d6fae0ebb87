"""The generate stage, whose engine sleeps: `python -m benchmarks.sleeping.generate`, with a stage's arguments."""

import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from transformers import PreTrainedTokenizerBase

from benchmarks.sleeping.pace import AGREED_LOGPROBS, Pace
from millrace.generation.engines.base import Engine, unstarted
from millrace.runtime.stage import run_stage
from millrace.stages import generate
from millrace.types import Request, Response, Sampling, Trajectory
from millrace.weights.base import Weights


class SleepingEngine(Engine):
    """Finishes all responses together, after a sleep proportional to their number.

    Like an engine in the stage's own process, it does nothing while the stage does other work.
    """

    def __init__(self, *, seconds: float, vocab_size: int, eos_token_id: int) -> None:
        """`seconds` is the sleep per rollout."""
        self.policy_version = 0
        self.vocab_size = vocab_size
        self._seconds = seconds
        self._eos = eos_token_id
        self._waiting: list[Request] = []

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self._waiting += requests

    def collect(self, seconds: float) -> list[Trajectory]:
        requests, self._waiting = self._waiting, []
        t_started = time.time()
        time.sleep(self._seconds * len(requests))
        response = Response(
            tokens=(self._eos,),
            rollout_logprobs=(0.0,),
            version_spans=((self.policy_version, 0),),
            finish_reason="stop",
        )
        t_finished = time.time()
        return [Trajectory(request=r, response=response, t_started=t_started, t_finished=t_finished) for r in requests]

    @property
    def tokens_in_flight(self) -> int:
        return 0

    def abort(self) -> None:
        self._waiting = []

    def interrupt(self) -> list[Trajectory]:
        requests, self._waiting = self._waiting, []
        return [unstarted(request) for request in requests]

    def update_weights(self, weights: Weights) -> float:
        self.policy_version = weights.id.policy_version
        return 0.0

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        return dict(AGREED_LOGPROBS)

    def sleep(self) -> None:
        """It is on no device."""

    def wake(self) -> None:
        """It is on no device."""

    def close(self) -> None:
        """There is nothing to end."""


def make_sleeping_engine(config: object, folder: Path, tokenizer: PreTrainedTokenizerBase, **how: object) -> Engine:
    """In place of `millrace.generation.engines.factory.make_engine`."""
    pace = Pace.from_environment()
    return SleepingEngine(
        seconds=pace.generate / pace.rollouts_per_step,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
    )


if __name__ == "__main__":
    with patch.object(generate, "make_engine", make_sleeping_engine):
        run_stage("generate", generate.main)
