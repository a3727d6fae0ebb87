"""The run of `support.replay.trained_run` as a mixture: groups with an even number are sums, the others are words."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from support.replay.trained_run import GENERATORS, TrainedRun, rewrite

from millrace.runs.record import latest_attempt, resume_run
from storage import layout
from storage.schema import CONSUMED, TRAJECTORY

SOURCES: dict[str, Any] = {"sums": {"weight": 2.0}, "words": {"scoring": {"reward": "math"}}}


def as_mixture(run: TrainedRun, sources: Mapping[str, Any] = SOURCES) -> TrainedRun:
    """Changes the stored run to one of these sources, which its newest attempt has."""
    resume_run(run.store, {**latest_attempt(run.store).config, "sources": dict(sources)})
    for generator in range(GENERATORS):
        rewrite(run, layout.trajectories(generator), TRAJECTORY, _with_sources)
    rewrite(run, layout.CONSUMED, CONSUMED, _with_sources)
    return run


def _with_sources(table: pa.Table) -> pa.Table:
    names = ["words" if group_id % 2 else "sums" for group_id in table["group_id"].to_pylist()]
    return table.set_column(table.schema.get_field_index("source"), table.schema.field("source"), pa.array(names))
