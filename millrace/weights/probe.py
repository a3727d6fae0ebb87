"""The cache-validity probe: do generator and trainer mean the same policy when they name the same version?

    trainer    version v, fixed tokens ─► log π of the likeliest next ones ─┐ travels with the weights
    generator  version v, the same tokens, through its own caches ─────────►┴─► how far apart, or an alarm

Weights that arrive whole can still be wrong in use: a key-value cache of older weights, a layer that keeps what its
kernel made of them, different rounding. None of that shows in a hash.
"""

import math
from collections.abc import Mapping, Sequence

from millrace.weights.base import Probe

MOST_TOKENS = 256
NUM_LOGPROBS = 8
"""How many of the likeliest next tokens are compared."""
MOST_DIVERGENCE = 0.03
"""Nats. Two implementations of SmolLM2-135M in bfloat16 diverge by up to 0.0016, and float32 from bfloat16 as much."""


def probe_tokens(prompt_tokens: Sequence[int], max_new_tokens: int) -> tuple[int, ...]:
    """The prompt repeated to the length that a trajectory of it may have, at most 256 tokens."""
    length = min(MOST_TOKENS, len(prompt_tokens) + max_new_tokens - 1)
    repeats = -(-length // len(prompt_tokens))
    return tuple((list(prompt_tokens) * repeats)[:length])


def largest_difference(expected: Probe, found: Mapping[int, float]) -> tuple[float, str]:
    """The largest |difference| of log π over the tokens that both name, nats, and the two numbers behind it.

    Infinite if they name none in common. At the edge of the likeliest ones the two may name different tokens.
    """
    common = expected.logprobs.keys() & found.keys()
    if not common:
        return math.inf, f"the likeliest next tokens are {sorted(found)} against {sorted(expected.logprobs)}"
    worst = max(common, key=lambda token: abs(expected.logprobs[token] - found[token]))
    numbers = f"token {worst}: {found[worst]:.5f} against the trainer's {expected.logprobs[worst]:.5f}"
    return abs(expected.logprobs[worst] - found[worst]), numbers


def divergence(expected: Probe, found: Mapping[int, float]) -> float:
    """½ · Σ (p − q) · (log p − log q) over the tokens that both name, nats: half of KL(p‖q) + KL(q‖p).

    Infinite if they name none in common. Each term is at least 0; an unlikely token adds little, however far apart.
    """
    common = expected.logprobs.keys() & found.keys()
    if not common:
        return math.inf
    pairs = [(expected.logprobs[token], found[token]) for token in common]
    return sum((math.exp(one) - math.exp(other)) * (one - other) for one, other in pairs) / 2


def alarm(expected: Probe, found: Mapping[int, float], tolerance: float | None) -> str | None:
    """What is wrong, as the end of a sentence, or None if `found` agrees with the trainer's `expected`.

    No log-probability may differ by more than `tolerance` nats. Where that is None, the divergence may be at most
    `MOST_DIVERGENCE`.
    """
    difference, numbers = largest_difference(expected, found)
    if tolerance is not None:
        return (
            f"log-probabilities of the same tokens differ by {difference:.2g} nats, more than {tolerance:g} ({numbers})"
            if difference > tolerance
            else None
        )
    if (apart := divergence(expected, found)) <= MOST_DIVERGENCE:
        return None
    return f"their next tokens diverge by {apart:.2g} nats, more than {MOST_DIVERGENCE:g} ({numbers})"


def tolerance_between(trainer_dtype: str, generator_dtype: str) -> float | None:
    """How much rounding alone may change a log-probability, nats: 1e-3 where both compute in float32.

    None in 16 bits: a logit of 20 is then rounded to multiples of 1/8, so that single log-probabilities tell nothing.
    """
    return 1e-3 if trainer_dtype == generator_dtype == "float32" else None
