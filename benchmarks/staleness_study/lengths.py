"""What became of short and of long responses, from the rows that the trainer stored about each of them."""

import statistics
from collections.abc import Sequence

from benchmarks.staleness_study.campaigns import Row
from millrace.prompts.chains import CHARACTERS_PER_SUM
from millrace.rollouts.consumed import TRAINED

CLASSES = {"up to 6": 6, "7 to 15": 15, "more": None}
"""Classes of responses: the most sums of each."""


def of_last_steps(consumed: Sequence[Row], steps: int) -> Row:
    """The figures of the last `steps` steps, from rows of the stream `consumed`: of all responses, and by class.

    The reward is that of all responses that were taken, so that modes which train on different lengths can be compared.
    """
    last = max((row["policy_version"] for row in consumed), default=0)
    rows = [row for row in consumed if row["policy_version"] > last - steps]
    most = [0, *(sums * CHARACTERS_PER_SUM for sums in CLASSES.values() if sums is not None), float("inf")]
    return {
        "reward_taken": _reward(rows),
        "by_length": {
            name: _became([row for row in rows if most[k] < row["tokens"] <= most[k + 1]])
            for k, name in enumerate(CLASSES)
        },
    }


def mean_by_length(found: Sequence[Row]) -> Row:
    """The mean of each figure of each class over campaigns; None where no campaign has one."""
    return {
        name: {
            figure: _mean([one[name][figure] for one in found if one[name][figure] is not None])
            for figure in ("trained_share", "masked_token_share", "reward")
        }
        for name in CLASSES
    }


def _became(rows: Sequence[Row]) -> Row:
    trained = [row for row in rows if row["outcome"] == TRAINED]
    tokens = sum(row["tokens"] for row in trained)
    return {
        "taken": len(rows),
        "trained_share": len(trained) / len(rows) if rows else None,
        "masked_token_share": sum(row["masked_tokens"] for row in trained) / tokens if tokens else None,
        "reward": _reward(rows),
    }


def _reward(rows: Sequence[Row]) -> float | None:
    return _mean([row["reward"] for row in rows if row["reward"] is not None])


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
