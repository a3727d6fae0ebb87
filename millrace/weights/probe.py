"""The cache-validity probe: do generator and trainer mean the same policy when they name the same version?

    trainer    version v, fixed tokens ─► log π of the likeliest next ones ─┐ travels with the weights
    generator  version v, the same tokens, through its own caches ─────────►┴─► largest difference, or an alarm

Weights that arrive whole can still be wrong in use: a key-value cache of older weights, a layer that keeps what its
kernel made of them, different rounding. None of that shows in a hash.
"""

import math
from collections.abc import Mapping, Sequence

from millrace.weights.base import Probe

MOST_TOKENS = 256
NUM_LOGPROBS = 8
"""How many of the likeliest next tokens are compared."""


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


def tolerance_between(trainer_dtype: str, generator_dtype: str) -> float:
    """How much rounding alone may differ, nats: 1e-3 where both compute in float32, else 0.1."""
    return 1e-3 if trainer_dtype == generator_dtype == "float32" else 0.1
