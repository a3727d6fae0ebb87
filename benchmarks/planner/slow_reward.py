"""A reward that computes for a millisecond, in a process of its own as all rewards of people do."""

import time

SECONDS = 0.001


def score(prompt: str, response: str, answer: str, meta: dict[str, str]) -> float:
    """1 for the right answer, after some work."""
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        pass
    return float(response == answer)
