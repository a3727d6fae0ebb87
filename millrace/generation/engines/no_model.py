"""The engine of a run that samples nothing: it loads no model, and only hears of the weights.

update_weights ─► policy_version ─► recorded with each demonstration
"""

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig

from millrace.generation.engines.base import Engine
from millrace.types import Request, Sampling, Trajectory
from millrace.weights.base import Weights


class NoModel(Engine):
    """Has nothing in flight, and the vocabulary of the model in `folder`."""

    in_flight = tokens_in_flight = 0

    def __init__(self, folder: Path) -> None:
        self.policy_version = 0
        self.vocab_size: int = AutoConfig.from_pretrained(folder).get_text_config().vocab_size

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Raises AssertionError: `Episodes` answers every request with a demonstration."""
        raise AssertionError("a request that needs a model")

    def collect(self, seconds: float) -> list[Trajectory]:
        return []

    def interrupt(self) -> list[Trajectory]:
        return []

    def update_weights(self, weights: Weights) -> float:
        self.policy_version = weights.id.policy_version
        return 0.0

    def next_logprobs(self, tokens: Sequence[int], most: int) -> dict[int, float]:
        return {}

    def sleep(self) -> None:
        """Does nothing: it uses no device."""

    def wake(self) -> None:
        """Does nothing: it uses no device."""

    def close(self) -> None:
        """Does nothing: it runs in the caller's process."""
