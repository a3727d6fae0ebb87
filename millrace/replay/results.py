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
        is_exact = not any(step.logprobs_difference for step in self.passed)
        is_exact = is_exact and all(checkpoint.identical for checkpoint in self.checkpoints)
        same = "the same bit for bit" if is_exact else f"the same within {self.tolerance:g}"
        without = f"; the run stored no log-probabilities of {self.steps_without_logprobs} of these steps"
        return f"{done} are {same}{without if self.steps_without_logprobs else ''}"

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON; `steps` is the number of steps that passed."""
        values = asdict(self)
        del values["passed"]
        return values | {
            "steps": len(self.passed),
            "checkpoints": [asdict(checkpoint) for checkpoint in self.checkpoints],
            "steps_without_logprobs": self.steps_without_logprobs,
            "sentence": self.sentence,
        }


Row = dict[str, Any]
"""One loss on one batch, by column."""
REPORTED = (
    "grad_norm",
    "clip_fraction",
    "effective_sample_size",
    "weight_mean",
    "weight_max",
    "importance_ratio_mean",
    "importance_ratio_max",
    "mismatch_kl",
    "tokens",
)
"""Columns of a comparison that are fields of a step's report."""
COSINE = "cosine_"
"""Prefix of a loss's name: the column of the cosine to its gradient."""


def comparison_schema(losses: Sequence[str]) -> pa.Schema:
    """Columns of a comparison of `losses`; docs/replay.md describes them."""
    types = {"loss": pa.string(), "step": pa.int64(), "groups": pa.int64(), "tokens": pa.int64()}
    names = ["step", "staleness_mean", "groups", "logprob_error", "loss", "surrogate", *REPORTED, "implied_kl"]
    names += [f"{COSINE}{loss}" for loss in losses]
    return pa.schema([(name, types.get(name, pa.float64())) for name in names])


def summarize_comparison(table: pa.Table) -> dict[str, Any]:
    """The comparison as JSON. `table` has the columns of `comparison_schema`.

    `losses` are in the order requested. `means` has a row per loss in that order: each number's mean over the steps
    where it is known, or None. `logprob_error` is the largest over the steps, nats; None if nothing was stored.
    """
    losses = [name.removeprefix(COSINE) for name in table.column_names if name.startswith(COSINE)]
    names = [name for name in table.column_names if name not in ("step", "loss")]
    means = table.group_by("loss").aggregate([(name, "mean") for name in names]).rename_columns(["loss", *names])
    # Arrow does not keep the order of the groups.
    rows = sorted(means.to_pylist(), key=lambda row: losses.index(row["loss"]))
    return {"losses": losses, "means": rows, "logprob_error": pc.max(table["logprob_error"]).as_py()}
