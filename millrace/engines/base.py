"""What every generation engine offers: tokens in, tokens with the behaviour policy's log-probabilities out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from millrace.types import Response, Sampling


class Engine(ABC):
    """A policy that generates, and whose weights can be replaced between two calls."""

    policy_version: int
    """Version of the weights now loaded; 0 is the base model."""
    vocab_size: int
    """How many token ids the policy knows: 0 to vocab_size − 1."""

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Response]:
        """One response a prompt, in order.

        `prompts` are token ids. The same weights, prompts, sampling and seed give the same responses on the same
        machine and thread count. Log-probabilities are those of the distribution that was sampled from, that is after
        temperature and top-p; under greedy decoding (temperature 0) they are those of the unscaled policy.
        """

    @abstractmethod
    def update_weights(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Replaces the weights, by name, with those of `policy_version`.

        Raises ValueError naming the tensors that are missing, unknown or of another shape; the old weights then stay.
        """
