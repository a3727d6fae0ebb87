"""The results of a replay: completed at its end, then as tables for a terminal and for Markdown."""

from collections.abc import Iterator, Mapping
from typing import Any

from flows.display.tables import TitledTable, for_markdown
from millrace.replay.rescore import compare_scores
from millrace.replay.results import read_results, read_spec, write_result
from millrace.replay.source_run import SourceRun
from millrace.runs.history import read_steps, tokens_per_second
from millrace.runs.status import StatusReader
from storage import layout
from storage.progress import read_status
from storage.stores.base import Store
from storage.stores.factory import open_store

_FIGURES = {
    "grad_norm": "gradient norm before clipping",
    "clip_fraction": "share of tokens clipped",
    "effective_sample_size": "effective sample size",
    "weight_max": "largest weight",
    "implied_kl": "KL of one step, nats",
}
"""Columns of a comparison whose means are shown."""


def collect(store: Store) -> dict[str, Any]:
    """Completes the results of the replay in `store`, and returns all of them by name.

    The stages verify and compare have written theirs.
    """
    spec = read_spec(store)
    assert spec is not None
    sources = [open_store(url) for url in spec.sources]
    if spec.rescore:
        rescored, changed = compare_scores(SourceRun(sources[0]), store)
        write_result(store, "rescored", rescored, table=("changed", changed))
    if spec.job == "train":
        write_result(store, "trained", {"runs": [_training_summary(run) for run in (*sources, store)]})
    return read_results(store)


def _training_summary(store: Store) -> dict[str, Any]:
    """How well and how fast the run in `store` trained. Raises RunMissing, and StreamCorrupt for damage.

    `steps` is the last policy version, `accuracy` the held-out greedy accuracy of the newest evaluated version above 0
    (None if none was evaluated). `tokens_per_second` counts response tokens, waiting included (None with fewer than two
    steps). `seconds` is the trainer's time by activity, `train_share` the share of it spent in optimizer steps.
    """
    status = StatusReader(store).look()
    steps = read_steps(store)
    seconds: dict[str, float] = dict(read_status(store, "train", 0).get("seconds", {}))
    total = sum(seconds.values())
    return {
        "run_id": status["run_id"],
        "steps": steps[-1].policy_version if steps else 0,
        "accuracy": status["eval"].get("end", {}).get("accuracy"),
        "tokens_per_second": tokens_per_second(steps),
        "train_share": seconds.get("train", 0.0) / total if total else None,
        "seconds": seconds,
    }


def as_markdown(results: Mapping[str, Any], store: Store) -> str:
    """The results for the Prefect UI; `store` holds the replay's run."""
    parts = map(for_markdown, sections(results))
    return "\n\n".join([*parts, f"All files are in `{store.url}/{layout.REPLAY_RESULTS}/`.\n"])


def sections(results: Mapping[str, Any]) -> Iterator[TitledTable]:
    """The results as titled tables, for a terminal and for Markdown."""
    tables = {"verdict": _verdict, "rescored": _rescored, "trained": _trained, "comparison": _compared}
    return (tables[name](result) for name, result in results.items())


def _verdict(verdict: Mapping[str, Any]) -> TitledTable:
    rows = []
    for checkpoint in verdict["checkpoints"]:
        stored, trained = checkpoint["stored_hash"], checkpoint["hash"]
        rows.append([str(checkpoint["step"]), stored, "same bits" if trained == stored else trained])
    header = ["checkpoint", "weights as stored", "trained again"] if rows else []
    return TitledTable(title="verdict", header=header, rows=rows, numbers=2, lines=[verdict["sentence"]])


def _rescored(rescored: Mapping[str, Any]) -> TitledTable:
    rows = [
        [
            source,
            f"{totals['rows']:,}",
            _share(totals["agreement"]),
            f"{totals['rose']:,}",
            f"{totals['fell']:,}",
            f"{totals['old_failed']:,} → {totals['new_failed']:,}",
            "–" if totals["shift"] is None else f"{totals['shift']:+.4f}",
        ]
        for source, totals in {**rescored["by_source"], "all": rescored["total"]}.items()
    ]
    unread = rescored["unread"]
    return TitledTable(
        title=f"{rescored['new_reward']} compared with {rescored['old_reward']}, by which the run was scored",
        header=["source", "rows", "agreed", "rose", "fell", "failed → now", "reward shift"],
        rows=rows,
        numbers=6,
        lines=[f"{len(unread)} parts could not be compared: {unread[0]}"] if unread else [],
    )


def _trained(trained: Mapping[str, Any]) -> TitledTable:
    rows = [
        [
            run["run_id"],
            f"{run['steps']:,}",
            "–" if run["accuracy"] is None else f"{run['accuracy']:.3f}",
            "–" if run["tokens_per_second"] is None else f"{run['tokens_per_second']:,.0f}",
            _share(run["train_share"]),
        ]
        for run in trained["runs"]
    ]
    header = ["run", "version", "accuracy", "tokens/s", "trainer busy training"]
    return TitledTable(title="trained on stored trajectories", header=header, rows=rows, numbers=4)


def _compared(comparison: Mapping[str, Any]) -> TitledTable:
    means, losses, error = comparison["means"], comparison["losses"], comparison["logprob_error"]
    names = {**_FIGURES, **{f"cosine_{loss}": f"cosine of gradients to {loss}" for loss in losses}}
    rows = [
        [title, *("–" if mean[name] is None else f"{mean[name]:.4g}" for mean in means)]
        for name, title in names.items()
        if any(mean[name] is not None for mean in means)
    ]
    lines = []
    if error == 0:
        lines = ["The weights are the run's own, bit for bit."]
    elif error is not None:
        lines = [f"The run's own log-probabilities differ by up to {error:.2g} nats: it is not repeated exactly here."]
    header = ["mean over the steps", *(mean["loss"] for mean in means)]
    return TitledTable(title="losses on the same batches", header=header, rows=rows, numbers=len(losses), lines=lines)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
