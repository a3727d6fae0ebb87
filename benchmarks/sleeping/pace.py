"""How long the sleeping stages sleep: set by the benchmark, read by their processes.

benchmark ─► environment ─► its campaign's tasks ─► stage processes, which inherit it
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

_VARIABLE = "MILLRACE_SLEEPS"

AGREED_LOGPROBS: Mapping[int, float] = {0: 0.0}
"""The response of trainer and generator to the probe of weight sync, nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Duration of an optimizer step in each stage, seconds, and its number of rollouts."""

    generate: float
    score: float
    train: float
    rollouts_per_step: int

    @property
    def step_seconds(self) -> float:
        """With perfect overlap and no overhead."""
        return max(self.generate, self.score, self.train)

    def to_environment(self) -> None:
        """Passes it to child processes."""
        os.environ[_VARIABLE] = json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> "Pace":
        """Raises KeyError in a process that the benchmark did not start."""
        return cls(**json.loads(os.environ[_VARIABLE]))
