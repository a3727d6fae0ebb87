"""What several losses made of the same batches: a table, a row a step and loss. Its columns, means and lines for plots.

Knows no torch: the table is made by `millrace.replay.compare` and read by whoever shows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from millrace.history import Point
from storage.schema import column

Row = dict[str, Any]
"""What one loss made of one batch, by column."""

_COLUMNS = [
    column("step", pa.int64(), "policy version that the run made of the batch"),
    column("staleness_mean", pa.float64(), "of the groups compared, policy versions"),
    column("groups", pa.int64(), "groups compared"),
    column(
        "logprob_error",
        pa.float64(),
        "largest difference between log pi of a token under the original's weights now, and what the run stored then, "
        "nats; 0: these are the run's own weights bit for bit; null: it is not stored",
        nullable=True,
    ),
    column("loss", pa.string(), "name of the loss"),
    column("surrogate", pa.float64(), "mean surrogate loss of a token"),
    column("grad_norm", pa.float64(), "global L2 norm of the gradient before clipping"),
    column("clip_fraction", pa.float64(), "share of tokens whose weight the loss bounded"),
    column("effective_sample_size", pa.float64(), "(sum w)^2 / (n * sum w^2) of the weights, in [0, 1]"),
    column("weight_mean", pa.float64(), "mean weight of a token"),
    column("weight_max", pa.float64(), "largest weight of a token"),
    column("importance_ratio_mean", pa.float64(), "mean pi/mu of a token before any clipping"),
    column("importance_ratio_max", pa.float64(), "largest pi/mu of a token before any clipping"),
    column("mismatch_kl", pa.float64(), "mean of log mu - log pi over the tokens, nats"),
    column("tokens", pa.int64(), "response tokens that carried loss"),
    column(
        "implied_kl",
        pa.float64(),
        "mean over the tokens of KL(before || after) of one optimizer step from the original's weights, nats; null "
        "with copies of their own",
        nullable=True,
    ),
    column(
        "drift_kl",
        pa.float64(),
        "mean over the tokens of KL(original || copy), both after the step, nats; null without copies of their own",
        nullable=True,
    ),
    column(
        "reward_weighted_drift_kl",
        pa.float64(),
        "the same mean, each token weighted with its response's reward; null also where a reward is negative or all "
        "are 0",
        nullable=True,
    ),
]
COSINE = "cosine_"
"""Before the name of a loss: the column of the cosine to its gradient."""


def comparison_schema(losses: Sequence[str]) -> pa.Schema:
    """Columns of a comparison of `losses`, each with what it means."""
    doc = "cosine between this loss's gradient and that of {}, in [-1, 1]; null where one of them is 0"
    cosines = [column(f"{COSINE}{name}", pa.float64(), doc.format(name), nullable=True) for name in losses]
    return pa.schema([*_COLUMNS, *cosines])


@dataclass(frozen=True)
class Comparison:
    """What several losses made of the same batches."""

    table: pa.Table
    """A row a step and loss, in their order: the columns of `comparison_schema`."""

    @property
    def losses(self) -> tuple[str, ...]:
        """Their names, in the order in which they were asked for."""
        return tuple(name.removeprefix(COSINE) for name in self.table.column_names if name.startswith(COSINE))

    @property
    def logprob_error(self) -> float | None:
        """The largest of its column, nats; None where nothing was stored."""
        return max((error for error in self.table["logprob_error"].to_pylist() if error is not None), default=None)

    def means(self) -> list[Row]:
        """One row a loss: the mean of each number over the steps where it is known, None where it never is."""
        rows = self.table.to_pylist()
        names = [name for name in self.table.column_names if name not in ("step", "loss")]
        return [
            {"loss": loss, **{name: _mean([row[name] for row in rows if row["loss"] == loss]) for name in names}}
            for loss in self.losses
        ]

    def series(self, name: str) -> dict[str, list[Point]]:
        """Loss → (step, value) of the column `name` wherever it is known: the lines of a plot."""
        rows = self.table.select(["step", "loss", name]).to_pylist()
        return {
            loss: [(row["step"], row[name]) for row in rows if row["loss"] == loss and row[name] is not None]
            for loss in self.losses
        }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
