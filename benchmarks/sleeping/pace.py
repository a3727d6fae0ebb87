"""How long the sleeping stages sleep: said by the benchmark, read by their processes.

benchmark ─► environment ─► its campaign's tasks ─► stage processes, which inherit it
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

_VARIABLE = "MILLRACE_SLEEPS"

AGREED_LOGPROBS: Mapping[int, float] = {0: 0.0}
"""What trainer and generator answer when weight sync asks both for the likeliest tokens, nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """What an optimizer step takes in each stage, seconds, and how many rollouts it is made of."""

    generate: float
    score: float
    train: float
    rollouts_per_step: int

    @property
    def step_seconds(self) -> float:
        """Of a pipeline that overlaps perfectly and costs nothing."""
        return max(self.generate, self.score, self.train)

    def to_environment(self) -> None:
        """For this process's children."""
        os.environ[_VARIABLE] = json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> "Pace":
        """Raises KeyError in a process that was not started by the benchmark."""
        return cls(**json.loads(os.environ[_VARIABLE]))
