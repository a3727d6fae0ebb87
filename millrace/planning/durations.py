"""Inputs of a simulation: how long each part of a campaign takes, and how long prompts and responses are.

Of several sources these are means by their weights where a plan needs means, and the most of any where it needs room.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import fmean
from typing import NamedTuple

import numpy as np

from configs.schema import RunConfig
from configs.sources import SourceConfig

_SAMPLED_GROUPS, _DRAWN_GROUPS = 256, 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Durations of one config on one machine, seconds. Each is that of the work alone, without waiting."""

    decode: Callable[[int, int], float]
    """(requests that a generator decodes at once, their tokens in the key-value cache) → seconds per token of each. If
    it `pads`, these tokens are counted as if all requests were as long as the longest of them."""
    prefill: Callable[[int], float]
    """Tokens that a generator computes at once → seconds: prompts of new groups, each once for all of its requests, or
    after new weights, without `generation.keep_cache`, the prompts and responses so far of all requests."""
    score: float
    """One scorer per rollout."""
    train: Callable[[int, int], float]
    """(tokens that the trainer computes in a step, rollouts) → seconds of the optimizer step. Prompts are included,
    with `training.share_prefixes` once per group, else once per rollout."""
    handover: float
    """How long the trainer stands still to hand a version over."""
    push: float
    """From the hand-over until a generator may take the version; it generates meanwhile."""
    pause: float
    """How long a generator stands still to load a version, without computing its caches again."""
    checkpoint: float
    """How long the trainer stands still for a checkpoint."""
    rollout: float = 0.0
    """How long a generator stands still for each response of a finished group: it becomes a row."""
    overhead: float = 0.0
    """Trainer time between two steps: reading, accounts, metrics."""
    pads: bool = False
    """Whether a generator computes all requests in flight as if they were as long as the longest of them."""
    cores: float | None = None
    """CPU cores that all stages share: if the busy ones have more threads, all slow down alike. None: stages
    share nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lengths:
    """Lengths of prompts and responses: each group gets those of a known group, drawn with replacement.

    So a long prompt keeps its long responses, and a group that was long as a whole stays so. The draw depends on the
    group alone, so that two plans are compared on the same work.
    """

    groups: Sequence[tuple[int, Sequence[int]]]
    """Tokens of the prompt and of each response, of every group that may be drawn."""
    group_size: int | None
    """A known group with as many responses is kept as it is; otherwise responses are drawn from it. None: all are kept,
    because sources have groups of different sizes."""
    max_tokens: int
    """Longer responses are cut off."""

    def of_group(self, group_id: int) -> tuple[int, Sequence[int]]:
        """Returns the tokens of the group's prompt, and of each of its responses."""
        rng = random.Random(group_id)
        prompt, responses = rng.choice(self.groups)
        if self.group_size is not None and len(responses) != self.group_size:
            responses = rng.choices(responses, k=self.group_size)
        return prompt, [min(self.max_tokens, tokens) for tokens in responses]

    @cached_property
    def means(self) -> "MeanLengths":
        """The means of some hundred groups."""
        groups = [self.of_group(number) for number in range(_SAMPLED_GROUPS)]
        responses = [tokens for _, group in groups for tokens in group]
        return MeanLengths(
            prompt=fmean(tokens for tokens, _ in groups),
            response=fmean(responses),
            running=fmean(tokens**2 for tokens in responses) / (2 * fmean(responses)),
        )


class MeanLengths(NamedTuple):
    """Mean lengths, tokens."""

    prompt: float
    response: float
    running: float
    """Of the responses in flight at any moment: E[L²] / 2 E[L], because long ones stay longer and each is half done."""


@lru_cache(maxsize=64)
def log_normal_lengths(
    *, prompt: int, mean: float, sigma: float, max_tokens: int, group_size: int, seed: int = 0
) -> Lengths:
    """Returns prompts of one length, and independent responses of log-normal length with this mean, before any is cut
    off. `sigma`: standard deviation of the logarithm; 0: all responses have the same length."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, (_DRAWN_GROUPS, group_size))
    groups = [(prompt, responses) for responses in drawn.round().clip(1, max_tokens).astype(int).tolist()]
    return Lengths(groups=groups, group_size=group_size, max_tokens=max_tokens)


def with_shares(config: RunConfig) -> list[tuple[float, RunConfig]]:
    """Returns the share of the groups of each source at the start, and its config."""
    sources = config.by_source()
    weights = {name: config.sources.get(name, SourceConfig()).weight for name in sources}
    total = sum(weights.values())
    return [(weights[name] / total, source) for name, source in sources.items()]


def mean_group_size(config: RunConfig) -> float:
    """Returns the mean number of responses of a group."""
    return sum(share * source.generation.group_size for share, source in with_shares(config))


def max_group_size(config: RunConfig) -> int:
    """Returns the number of responses of the largest groups."""
    return max(source.generation.group_size for source in config.by_source().values())


def max_new_tokens(config: RunConfig) -> int:
    """Returns the greatest length of a response."""
    return max(source.generation.max_new_tokens for source in config.by_source().values())


def common_group_size(config: RunConfig) -> int | None:
    """Returns the size that all groups have, or None if sources have groups of different sizes."""
    sizes = {source.generation.group_size for source in config.by_source().values()}
    return sizes.pop() if len(sizes) == 1 else None


def mixed_lengths(parts: Iterable[tuple[float, Lengths]]) -> Lengths:
    """Returns lengths of which each part has a share."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0][1]
    groups = [
        group for share, lengths in parts for group in lengths.groups[: max(1, round(share * len(lengths.groups)))]
    ]
    return Lengths(groups=groups, group_size=None, max_tokens=max(lengths.max_tokens for _, lengths in parts))
