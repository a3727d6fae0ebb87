"""A run, and rows of the stream `consumed`, as the dashboard's readers return them, made by hand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from configs.stored import DEFAULT_SOURCE
from dashboard.read.model import AttemptInfo, Columns, Consumed, RunData, RunInfo
from millrace.runs.provenance import Origin, Provenance
from storage.schema import CONSUMED

T = 1_700_000_000.0
"""The time of the look, unix seconds."""
OUTCOMES = ("trained", "stale")

CONFIG: Mapping[str, Any] = {
    "pipeline": {"mode": "async"},
    "staleness": {"max_staleness": 4},
    "weights": {"transport": "shm"},
}
PROVENANCE = Provenance(
    python="3.12.1", platform="Linux", dependencies={"torch": "2.9.0"}, commit="c0ffee", dirty=False, cpu="a CPU",
    config_hash=None,
)  # fmt: skip

STATUS: Mapping[str, Any] = {
    "state": "running",
    "steps": 3,
    "max_steps": 10,
    "ledger": {
        "generated": {"rollouts": 30, "tokens": 90},
        "trained": {"rollouts": 12, "tokens": 36},
        "buffered": {"rollouts": 8, "tokens": 24},
        "in_flight": {"rollouts": 6, "tokens": 18},
        "dropped": {"stale": {"rollouts": 3, "tokens": 9}, "corrupt": {"rollouts": 1, "tokens": 3}},
    },
    "tokens": {"generate": 90, "score": 72, "train": 36},
    "seconds": {
        "generate": 8.0, "idle_generate": 2.0, "score": 1.0, "idle_score": 9.0,
        "train": 7.5, "idle_train": 2.5, "sync": 0.5, "idle_sync": 9.5,
    },
}  # fmt: skip


def measured(values: list[float]) -> Columns:
    """A metric of policy versions 1, 2, …, a second apart."""
    versions = np.arange(1, len(values) + 1)
    return {
        "t": T - len(values) + versions,
        "incarnation": np.zeros(len(values), np.int32),
        "policy_version": versions,
        "value": np.array(values, np.float64),
    }


def generating(**changes: Any) -> dict[str, Any]:
    """The status record of a generator at work; `changes` are fields of it."""
    return {
        "t": T - 5,
        "doing": "generate",
        "requests_in_flight": 12,
        "groups_in_flight": 5,
        "tokens_in_flight": 700,
        "oldest_version_in_flight": 6,
        "t_oldest_in_flight": T - 2.5,
        "tokens_continued": 40,
        "tokens_discarded": 7,
        **changes,
    }


def attempt(config: Mapping[str, Mapping[str, Any]] | None = None, **changes: Any) -> AttemptInfo:
    """The first start of a run, a minute before `T`; `config` are settings by section, `changes` other fields."""
    sections = {name: {**CONFIG.get(name, {}), **section} for name, section in (config or {}).items()}
    origin = Origin(defaults={"staleness.max_staleness": [2]})
    values = {"number": 0, "t_started": T - 60, "provenance": PROVENANCE, "origin": origin, **changes}
    return AttemptInfo(config={**CONFIG, **sections}, **values)


def with_config(run: RunData, config: Mapping[str, Mapping[str, Any]]) -> RunData:
    """The run with these settings, by section."""
    return replace(run, info=replace(run.info, attempts=(attempt(config),)))


def run_data(run_id: str = "mine", **changes: Any) -> RunData:
    """A run after three of ten steps; `changes` are fields of RunData."""
    values: dict[str, Any] = {
        "info": RunInfo(run_id=run_id, url=f"/runs/{run_id}", attempts=(attempt(),)),
        "t": T,
        "status": STATUS,
        "stage_status": {
            "train-0": {"t": T - 2, "doing": "train"},
            "generate-1": {"t": T - 5, "doing": "generate"},
            "score-0": {"t": T - 30, "doing": "stopped"},
            "evaluate-0": {"t": T - 50, "doing": "evaluate"},
        },
        "consumed": {"t": np.array([T - 2, T - 1]), "outcome": np.array([0, 1], np.int8)},
        "outcomes": OUTCOMES,
        "sources": (DEFAULT_SOURCE,),
        "prompts": (),
        "metrics": {
            "train-0": {"loss": measured([0.5, 0.25, -0.125]), "staleness_mean": measured([0.0, 1.0, 1.5])},
            "sync_weights-0": {"push_seconds": measured([0.02, 0.04])},
        },
        "evaluations": {
            "policy_version": np.array([0, 2]),
            "accuracy": np.array([0.25, 0.5]),
            "accuracy_low": np.array([0.125, np.nan]),
            "accuracy_high": np.array([0.5, np.nan]),
            "num_prompts": np.array([8, 8]),
            "t": np.array([T - 50, T - 1]),
            "seconds": np.array([4.0, 0.5]),
        },
    }
    values |= changes
    columns, *names = (values.pop(name) for name in ("consumed", "outcomes", "sources", "prompts"))
    consumed = Consumed(columns, **dict(zip(("outcomes", "sources", "prompts"), names, strict=True)))
    run = RunData(**{"recent": consumed, "read_consumed": lambda: consumed, **values})
    mixed = {name: {} for name in consumed.sources if name}
    return run if "info" in changes or len(mixed) < 2 else with_config(run, {"sources": mixed})


def consumed_rows(policy_version: npt.ArrayLike, **columns: npt.ArrayLike) -> Columns:
    """A row for each of `policy_version`; other columns as given, one value for all or one each, 0 where not.

    `outcome` and `source` are codes; a reward of None is NaN, as a null of the stream is.
    """
    versions = np.asarray(policy_version, np.int64)
    given = {**columns, "policy_version": versions}
    return {
        field.name: np.array(np.broadcast_to(np.asarray(given.get(field.name, 0), _dtype(field.name)), versions.shape))
        for field in CONSUMED
    }


def _dtype(name: str) -> npt.DTypeLike:
    is_code = name in ("outcome", "source")
    dtype: npt.DTypeLike = np.int8 if is_code else CONSUMED.field(name).type.to_pandas_dtype()
    return dtype
