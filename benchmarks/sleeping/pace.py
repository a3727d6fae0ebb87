"""How long a campaign's stages take: set by the benchmark, read by the stage processes from their environment."""

import json
import math
import os
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass

VARIABLE = "MILLRACE_SLEEPS"
"""The environment variable that holds the pace."""

AGREED_LOGPROBS: Mapping[int, float] = {0: 0.0}
"""How trainer and generator answer the probe of weight sync, nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SleepingPace:
    """Responses of log-normal length, each sampled at the same constant rate, and the trainer's seconds per step."""

    sigma: float = 0.0
    """Standard deviation of the logarithm of the length."""
    mean_tokens: float = 1.0
    """Mean length of a response."""
    seconds_per_token: float = 0.0
    slots: int
    """Responses that the engine samples at once."""
    train_seconds: float = 0.0
    """Sleep of the trainer per optimizer step."""
    real_engine: bool = False
    """Whether the configured engine generates, metered; only the lengths of its responses are set then."""

    def num_tokens(self, group_id: int, sample_index: int) -> int:
        """Returns the length of a response, which is the same in every campaign."""
        normal = random.Random(f"{group_id}:{sample_index}").gauss(0.0, 1.0)
        return max(1, round(self.mean_tokens * math.exp(self.sigma * normal - self.sigma**2 / 2)))

    def to_environment(self) -> dict[str, str]:
        """Returns the environment variable for child processes."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> "SleepingPace":
        """Raises KeyError in a process that no benchmark started."""
        return cls(**json.loads(os.environ[VARIABLE]))
