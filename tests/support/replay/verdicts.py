"""The first difference in the verdict on a stored run."""

from millrace.replay.results import ReplayVerdict


def parted(verdict: ReplayVerdict) -> tuple[int, str, str]:
    """The step that differs, what of it, and how; the run must have parted."""
    assert verdict.difference is not None, verdict.sentence
    return verdict.difference.step, verdict.difference.what, verdict.difference.sentence
