"""The results of a replay. The stages verify and compare write their own; the others are made here, at the end."""

from typing import Any

from millrace.replay.rescore import compare_scores
from millrace.replay.results import read_results, write_result
from millrace.replay.sources.source_run import SourceRun
from millrace.replay.spec import read_spec
from millrace.replay.summary import training_summary
from millrace.runs.record import latest_attempt
from storage.stores.base import Store
from storage.stores.factory import open_store


def collect(store: Store) -> dict[str, Any]:
    """Completes the results of the replay in `store`, and returns all of them by name."""
    spec = read_spec(store)
    assert spec is not None
    sources = [open_store(url) for url in spec.sources]
    if spec.rescore:
        scoring = latest_attempt(store).config["scoring"]
        rescored, changed = compare_scores(SourceRun(sources[0]), store, scoring["reward"], scoring["replicas"])
        write_result(store, "rescored", rescored, table=("changed", changed))
    if spec.job == "train":
        write_result(store, "trained", {"runs": [training_summary(run) for run in (*sources, store)]})
    return read_results(store)
