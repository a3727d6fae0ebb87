"""The results of a replay, and the files of the replay's run that hold them. Does not import torch.

replay.json ─► read by its stages
verify  ─► verdict.json                           rescore ─► rescored.json, changed.parquet
compare ─► comparison.json, comparison.parquet    train   ─► trained.json
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from configs.requests import ReplayRequest
from storage import layout
from storage.errors import NotInStore
from storage.schema import column
from storage.stores.base import Store


def write_spec(store: Store, spec: ReplayRequest) -> None:
    """Stores the request, once, when the replay's run is created."""
    store.put_if_absent(layout.REPLAY, spec.model_dump_json(indent=1).encode())


def read_spec(store: Store) -> ReplayRequest | None:
    """The request; None if the run is not a replay."""
    try:
        return ReplayRequest.model_validate_json(bytes(store.get(layout.REPLAY)))
    except NotInStore:
        return None


def write_result(store: Store, name: str, values: dict[str, Any], table: tuple[str, pa.Table] | None = None) -> None:
    """Writes `values` as `<name>.json`, and a named table as Parquet."""
    if table is not None:
        sink = pa.BufferOutputStream()
        pq.write_table(table[1], sink)
        store.put(f"{layout.REPLAY_RESULTS}/{table[0]}.parquet", memoryview(sink.getvalue()))
    store.put(f"{layout.REPLAY_RESULTS}/{name}.json", json.dumps(values, indent=1).encode())


def read_results(store: Store) -> dict[str, Any]:
    """The JSON results that exist, by name."""
    results = {}
    for name in ("verdict", "rescored", "trained", "comparison"):
        with suppress(NotInStore):
            results[name] = json.loads(bytes(store.get(f"{layout.REPLAY_RESULTS}/{name}.json")))
    return results


def read_table(store: Store, name: str) -> pa.Table:
    """The table `<name>.parquet`."""
    return pq.read_table(pa.BufferReader(pa.py_buffer(store.get(f"{layout.REPLAY_RESULTS}/{name}.parquet"))))


@dataclass(frozen=True, kw_only=True)
class CheckpointVerdict:
    """A stored checkpoint compared with the same version trained again."""

    step: int
    stored_hash: str
    """Hash of the stored weights: XXH3 over names, dtypes, shapes and bytes, 32 hex digits."""
    hash: str
    """Hash of the weights trained again."""
    identical: bool
    """Bit for bit, the optimizer's state included."""
    difference: float
    """Largest absolute difference between two elements, the optimizer's state included."""


@dataclass(frozen=True, kw_only=True)
class StepVerdict:
    """One step that was trained again and passed."""

    step: int
    """Policy version that it made."""
    rollouts: int
    tokens: int
    """Response tokens of its trajectories."""
    logprobs_difference: float | None
    """Largest absolute difference of a token's log π before the step, nats; None if the run stored none."""
    checkpoint: CheckpointVerdict | None
    """None if the version is not stored."""

    @property
    def identical(self) -> bool:
        """Bit for bit, as far as there was something to compare with."""
        return not self.logprobs_difference and (self.checkpoint is None or self.checkpoint.identical)


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The first difference between the stored run and its repetition."""

    step: int
    """Named by the policy version that it made."""
    what: Literal["damage", "data", "logprobs", "weights"]
    """damage: a file differs from what its writer committed; data: rewards differ from those trained with."""
    sentence: str
    """The repeated value, and the stored one."""
    causes: tuple[str, ...] = ()
    """Known explanations, the most likely first; empty: unknown."""


@dataclass(kw_only=True)
class ReplayVerdict:
    """The result of training a stored run again."""

    url: str
    from_step: int
    """Policy version it started from; 0: the start model."""
    tolerance: float | None
    """None: only bit-for-bit equality passes."""
    passed: list[StepVerdict] = field(default_factory=list)
    """Steps trained again that passed."""
    difference: Mismatch | None = None
    """None: everything passed."""
    unlike: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Differences between the original environment and this one, by name: (there, here)."""

    @property
    def checkpoints(self) -> list[CheckpointVerdict]:
        """The checkpoints compared."""
        return [step.checkpoint for step in self.passed if step.checkpoint is not None]

    @property
    def inexact_step(self) -> int | None:
        """First step that is within the tolerance but not equal bit for bit."""
        return next((step.step for step in self.passed if not step.identical), None)

    @property
    def steps_without_logprobs(self) -> int:
        """Steps without stored log-probabilities: differences show only at the next checkpoint."""
        return sum(step.logprobs_difference is None for step in self.passed)

    @property
    def sentence(self) -> str:
        """The verdict, for people."""
        if self.difference is not None:
            if self.difference.what == "damage":
                return f"step {self.difference.step} can't be trained again: {self.difference.sentence}"
            causes = "; ".join(self.difference.causes) or "unknown"
            return f"step {self.difference.step} differs: {self.difference.sentence} (cause: {causes})"
        num_checkpoints = f"{len(self.checkpoints)} checkpoint{'' if len(self.checkpoints) == 1 else 's'}"
        done = f"steps {self.from_step + 1} to {self.from_step + len(self.passed)} and {num_checkpoints}"
        exact = "the same bit for bit"
        if self.inexact_step is not None:
            exact = f"the same within {self.tolerance:g}, bit for bit up to step {self.inexact_step - 1}"
        without = f"; the run stored no log-probabilities of {self.steps_without_logprobs} of these steps"
        return f"{done} are {exact}{without if self.steps_without_logprobs else ''}"

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON; `steps` is the number of steps that passed."""
        values = asdict(self)
        del values["passed"]
        return values | {
            "steps": len(self.passed),
            "checkpoints": [asdict(checkpoint) for checkpoint in self.checkpoints],
            "inexact_step": self.inexact_step,
            "steps_without_logprobs": self.steps_without_logprobs,
            "sentence": self.sentence,
        }


Row = dict[str, Any]
"""One loss on one batch, by column."""
_FLOAT = pa.float64()
REPORTED = [
    column("grad_norm", _FLOAT, "global L2 norm of the gradient before clipping"),
    column("clip_fraction", _FLOAT, "share of tokens whose weight the loss bounded"),
    column("effective_sample_size", _FLOAT, "(sum w)^2 / (n * sum w^2) of the weights, in [0, 1]"),
    column("weight_mean", _FLOAT, "mean weight of a token"),
    column("weight_max", _FLOAT, "largest weight of a token"),
    column("importance_ratio_mean", _FLOAT, "mean pi/mu of a token before any clipping"),
    column("importance_ratio_max", _FLOAT, "largest pi/mu of a token before any clipping"),
    column("mismatch_kl", _FLOAT, "mean of log mu - log pi over the tokens, nats"),
    column("tokens", pa.int64(), "trainable response tokens"),
]
"""Columns of a comparison that are fields of a step's report."""
_LOGPROB_ERROR = (
    "largest difference between log pi of a token under the original's weights now and the log pi stored by the run, "
    "nats; 0: these are the run's own weights bit for bit; null: it is not stored"
)
_IMPLIED_KL = "mean over the tokens of KL(before || after) of one optimizer step from the original's weights, nats"
_COLUMNS = [
    column("step", pa.int64(), "policy version that the run made of the batch"),
    column("staleness_mean", _FLOAT, "of the groups compared, policy versions"),
    column("groups", pa.int64(), "groups compared"),
    column("logprob_error", _FLOAT, _LOGPROB_ERROR, nullable=True),
    column("loss", pa.string(), "name of the loss"),
    column("surrogate", _FLOAT, "mean surrogate loss of a token"),
    *REPORTED,
    column("implied_kl", _FLOAT, _IMPLIED_KL, nullable=True),
]
COSINE = "cosine_"
"""Prefix of a loss's name: the column of the cosine to its gradient."""


def comparison_schema(losses: Sequence[str]) -> pa.Schema:
    """Columns of a comparison of `losses`, each documented."""
    doc = "cosine between this loss's gradient and that of {}, in [-1, 1]; null where one of them is 0"
    cosines = [column(f"{COSINE}{name}", _FLOAT, doc.format(name), nullable=True) for name in losses]
    return pa.schema([*_COLUMNS, *cosines])


@dataclass(frozen=True)
class LossComparison:
    """Several losses on the same batches."""

    table: pa.Table
    """A row per step and loss, in this order; columns as in `comparison_schema`."""

    @property
    def losses(self) -> tuple[str, ...]:
        """The names of the losses, in the order requested."""
        return tuple(name.removeprefix(COSINE) for name in self.table.column_names if name.startswith(COSINE))

    @property
    def logprob_error(self) -> float | None:
        """Largest over the steps, nats; None if nothing was stored."""
        error: float | None = pc.max(self.table["logprob_error"]).as_py()
        return error

    def means(self) -> list[Row]:
        """One row per loss: the mean of each number over the steps where it is known, or None."""
        names = [name for name in self.table.column_names if name not in ("step", "loss")]
        tables = {loss: self.table.filter(pc.equal(self.table["loss"], loss)) for loss in self.losses}
        return [
            {"loss": loss, **{name: pc.mean(table[name]).as_py() for name in names}} for loss, table in tables.items()
        ]
