"""The comparison of several losses on the same batches: a row per step and loss, means, and lines for plots.

Does not import torch: `millrace.replay.compare` makes the table, flows show it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from millrace.runs.history import Point
from storage.schema import column

Row = dict[str, Any]
"""One loss on one batch, by column."""

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
        "mean over the tokens of KL(before || after) of one optimizer step from the original's weights, nats",
        nullable=True,
    ),
]
COSINE = "cosine_"
"""Prefix of a loss's name: the column of the cosine to its gradient."""


def comparison_schema(losses: Sequence[str]) -> pa.Schema:
    """Columns of a comparison of `losses`, each documented."""
    doc = "cosine between this loss's gradient and that of {}, in [-1, 1]; null where one of them is 0"
    cosines = [column(f"{COSINE}{name}", pa.float64(), doc.format(name), nullable=True) for name in losses]
    return pa.schema([*_COLUMNS, *cosines])


@dataclass(frozen=True)
class Comparison:
    """Several losses on the same batches."""

    table: pa.Table
    """A row per step and loss, in this order; columns as in `comparison_schema`."""

    @property
    def losses(self) -> tuple[str, ...]:
        """Their names, in the order requested."""
        return tuple(name.removeprefix(COSINE) for name in self.table.column_names if name.startswith(COSINE))

    @property
    def logprob_error(self) -> float | None:
        """Largest over the steps, nats; None if nothing was stored."""
        return max((error for error in self.table["logprob_error"].to_pylist() if error is not None), default=None)

    def means(self) -> list[Row]:
        """One row per loss: the mean of each number over the steps where it is known, or None."""
        rows = self.table.to_pylist()
        names = [name for name in self.table.column_names if name not in ("step", "loss")]
        return [
            {"loss": loss, **{name: _mean([row[name] for row in rows if row["loss"] == loss]) for name in names}}
            for loss in self.losses
        ]

    def series(self, name: str) -> dict[str, list[Point]]:
        """Loss → (step, value) of the column `name` where it is known: the lines of a plot."""
        rows = self.table.select(["step", "loss", name]).to_pylist()
        return {
            loss: [(row["step"], row[name]) for row in rows if row["loss"] == loss and row[name] is not None]
            for loss in self.losses
        }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
