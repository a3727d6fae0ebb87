"""How long everything takes that a campaign does: what the simulation asks of a cost model, and looks up again."""

from collections.abc import Callable
from dataclasses import dataclass

_RESOLUTION = 9
"""A cache of the expected size is divided into up to 2 ** this parts, which count as equally large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Durations of one config on one machine, seconds. Each is that of the work alone, without waiting."""

    decode: Callable[[int, int], float]
    """(requests that a generator decodes at once, their tokens in the key-value cache) → seconds per token of each. If
    it `pads`, these tokens are counted as if all requests were as long as the longest of them."""
    prefill: Callable[[int], float]
    """Tokens that a generator computes at once → seconds: prompts of new groups, each once for all of its requests, or
    after new weights the prompts and responses so far of all requests."""
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
    score_part: float = 0.0
    """One scorer per part of trajectories besides: it is read, and its scores are committed."""
    overhead: float = 0.0
    """What a trainer does between two steps besides: reading, accounts, metrics."""
    recompute: Callable[[int], float] | None = None
    """Tokens in the caches that a generator computes again after new weights, counted as for `decode` → seconds; None:
    as `prefill`."""
    pads: bool = False
    """Whether a generator computes all requests in flight as if they were as long as the longest of them."""
    collect: float = 0.0
    """How long a generator stands still each time that responses end: it looks for weights and for room."""
    cores: float | None = None
    """CPU cores that all stages share: if those that are busy have more threads, all get slower alike. None: each stage
    has devices of its own."""


class DecodeRates:
    """What `decode` says of up to `slots` requests, for caches of about `expected_tokens`: within a few thousandths of
    that many tokens."""

    def __init__(self, decode: Callable[[int, int], float], expected_tokens: float, slots: int) -> None:
        self._decode = decode
        self.shift = max(0, int(expected_tokens).bit_length() - _RESOLUTION)
        """Tokens in the cache, shifted right by so many bits, are the key in a row."""
        self.rows: list[dict[int, float]] = [{} for _ in range(slots + 1)]
        """By requests: the rates known so far."""

    def ask(self, running: int, key: int) -> float:
        """The rate, which is then in the row. Raises ValueError if it is not a positive number."""
        # The middle of what has this key.
        seconds = self._decode(running, (key << self.shift) + ((1 << self.shift) >> 1))
        if not 0 < seconds < float("inf"):
            raise ValueError(f"a cost model decodes {running} requests in {seconds} seconds per token")
        self.rows[running][key] = seconds
        return seconds
