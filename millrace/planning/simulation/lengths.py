"""How long prompts and responses are, by group: drawn from a distribution, or taken from a stored run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

_BLOCK_GROUPS = 1024
"""Groups whose lengths are drawn at once."""


class Lengths(Protocol):
    """Lengths that depend on the group alone, so that two plans are compared on the same work."""

    def of_group(self, group_id: int) -> tuple[int, Sequence[int]]:
        """Tokens of its prompt, and of each of its responses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogNormalLengths:
    """Prompts of one length, and responses of log-normal length, independent of each other."""

    prompt_tokens: int
    mean_tokens: float
    """Mean length of a response before it is cut off."""
    sigma: float
    """Standard deviation of the logarithm of the length; 0: all are alike."""
    max_tokens: int
    """Longer responses are cut off."""
    group_size: int
    seed: int = 0

    def of_group(self, group_id: int) -> tuple[int, Sequence[int]]:
        block, place = divmod(group_id, _BLOCK_GROUPS)
        return self.prompt_tokens, _block(self, block)[place]


@lru_cache(maxsize=64)
def _block(lengths: LogNormalLengths, block: int) -> list[list[int]]:
    """[_BLOCK_GROUPS][group_size] lengths of the groups from `block * _BLOCK_GROUPS` on, tokens."""
    rng = np.random.default_rng((lengths.seed, block))
    mu = math.log(lengths.mean_tokens) - lengths.sigma**2 / 2
    drawn = rng.lognormal(mu, lengths.sigma, (_BLOCK_GROUPS, lengths.group_size))
    tokens: list[list[int]] = np.clip(np.rint(drawn), 1, lengths.max_tokens).astype(np.int64).tolist()
    return tokens
