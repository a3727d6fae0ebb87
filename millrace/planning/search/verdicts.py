"""Why a candidate is as fast as it is, and how it compares, in words."""

from millrace.planning.simulation.outcome import Outcome
from millrace.runs.bottleneck import find_bottleneck

ALIKE = 0.02
"""Candidates whose speeds differ by no more than this share are as good."""


def bottleneck(outcome: Outcome, *, sync: bool, push: float = 0.0) -> str:
    """What holds the pipeline up, with idle shares: "trainer-bound: train 99% busy, generate idle 44%".

    `push`: seconds that a version travels to the generators.
    """
    return find_bottleneck(outcome.idle, sync=sync, step_seconds=outcome.step_seconds, push=push).sentence


def compared(step_seconds: float, winner_step_seconds: float) -> str:
    """How much slower than the winner, of the same batch."""
    ratio = step_seconds / winner_step_seconds
    if abs(ratio - 1) <= ALIKE:
        return "as fast"
    return f"{ratio:.2f} × slower" if ratio > 1 else f"{1 / ratio:.2f} × faster"
