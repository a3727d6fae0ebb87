"""The cache-validity probe checks that generator and trainer compute the same policy for the same version.

    trainer    version v, fixed tokens ─► log π of the likeliest next ones ─┐ travels with the weights
    generator  version v, the same tokens, through its own caches ─────────►┴─► difference, or an alarm

Weights that arrive whole can still be wrong in use: a key-value cache of older weights, a layer with a stale derived
copy, different rounding. A hash shows none of these.
"""

import math
from collections.abc import Mapping, Sequence

from millrace.weights.base import Probe

MOST_TOKENS = 256
NUM_LOGPROBS = 8
"""Number of the likeliest next tokens that are compared."""
MOST_DIVERGENCE = 0.03
"""Nats. Two implementations of SmolLM2-135M in bfloat16 diverge by up to 0.0016, and float32 from bfloat16 as much."""


def probe_tokens(prompt_tokens: Sequence[int], max_new_tokens: int) -> tuple[int, ...]:
    """The prompt repeated to the length that a trajectory of it may have, at most 256 tokens."""
    length = min(MOST_TOKENS, len(prompt_tokens) + max_new_tokens - 1)
    repeats = -(-length // len(prompt_tokens))
    return tuple((list(prompt_tokens) * repeats)[:length])


def largest_difference(expected: Probe, logprobs: Mapping[int, float]) -> tuple[float, str]:
    """The largest |difference| of log π over the tokens in both, nats, and a description of it.

    Infinite if no token is in both. The last of the likeliest tokens may differ between the two.
    """
    common = expected.logprobs.keys() & logprobs.keys()
    if not common:
        return math.inf, f"the likeliest next tokens are {sorted(logprobs)} against {sorted(expected.logprobs)}"
    worst = max(common, key=lambda token: abs(expected.logprobs[token] - logprobs[token]))
    numbers = f"token {worst}: {logprobs[worst]:.5f} against the trainer's {expected.logprobs[worst]:.5f}"
    return abs(expected.logprobs[worst] - logprobs[worst]), numbers


def divergence(expected: Probe, logprobs: Mapping[int, float]) -> float:
    """½ · Σ (p − q) · (log p − log q) over the tokens in both, nats: half of KL(p‖q) + KL(q‖p).

    Infinite if no token is in both. Each term is at least 0; an unlikely token adds little.
    """
    common = expected.logprobs.keys() & logprobs.keys()
    if not common:
        return math.inf
    pairs = [(expected.logprobs[token], logprobs[token]) for token in common]
    return sum((math.exp(p) - math.exp(q)) * (p - q) for p, q in pairs) / 2


def alarm(expected: Probe, logprobs: Mapping[int, float], tolerance: float | None) -> str | None:
    """Describes the disagreement of a generator's `logprobs` with the trainer's; None if they agree.

    They agree if no log-probability differs by more than `tolerance` nats. If that is None, the divergence may be at
    most `MOST_DIVERGENCE`.
    """
    difference, numbers = largest_difference(expected, logprobs)
    if tolerance is not None:
        what, most = "log-probabilities of the same tokens differ", tolerance
    else:
        what, most, difference = "their next tokens diverge", MOST_DIVERGENCE, divergence(expected, logprobs)
    return f"{what} by {difference:.2g} nats, more than {most:g} ({numbers})" if difference > most else None


def tolerance_between(trainer_dtype: str, generator_dtype: str) -> float | None:
    """Largest change of a log-probability by rounding, nats: 1e-3 if both compute in float32.

    None in 16 bits: a logit of 20 is rounded to multiples of 1/8, so single log-probabilities can't be compared.
    """
    return 1e-3 if trainer_dtype == generator_dtype == "float32" else None
