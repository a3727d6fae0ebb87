"""How long the sleeping stages sleep: set by the benchmark, read by their processes.

benchmark ─► environment ─► its campaign's tasks ─► stage processes, which inherit it
"""

import json
import math
import os
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass

VARIABLE = "MILLRACE_SLEEPS"
"""The environment variable that holds the pace."""

AGREED_LOGPROBS: Mapping[int, float] = {0: 0.0}
"""The response of trainer and generator to the probe of weight sync, nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongTail:
    """Responses of log-normal length, each sampled at the same constant rate."""

    sigma: float
    """Standard deviation of the logarithm of the length."""
    mean_tokens: float
    """Mean length of a response."""
    seconds_per_token: float
    places: int
    """Responses that the engine samples at once."""

    def tokens(self, group_id: int, sample_index: int) -> int:
        """Length of a response. It depends on its place in the run alone, so all campaigns have the same lengths."""
        normal = random.Random(f"{group_id}:{sample_index}").gauss(0.0, 1.0)
        return max(1, round(self.mean_tokens * math.exp(self.sigma * normal - self.sigma**2 / 2)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Duration of an optimizer step in each stage, seconds, and its number of rollouts."""

    generate: float
    score: float
    train: float
    rollouts_per_step: int
    long_tail: LongTail | None = None
    """Without it, an engine finishes all its responses together."""

    @property
    def step_seconds(self) -> float:
        """With perfect overlap and no overhead."""
        return max(self.generate, self.score, self.train)

    def to_json(self) -> str:
        """For the environment of child processes."""
        return json.dumps(asdict(self))

    def to_environment(self) -> None:
        """Passes it to child processes."""
        os.environ[VARIABLE] = self.to_json()

    @classmethod
    def from_environment(cls) -> "Pace":
        """Raises KeyError in a process that the benchmark did not start."""
        fields = json.loads(os.environ[VARIABLE])
        tail = fields.pop("long_tail")
        return cls(**fields, long_tail=None if tail is None else LongTail(**tail))
