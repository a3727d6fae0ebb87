"""The results of a replay as tables for a terminal, and as Markdown with plots for the Prefect UI."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from flows.display.plots import line_chart
from flows.display.terminal import new_table, plain
from millrace.replay.results import LossComparison, read_table
from storage import layout
from storage.stores.base import Store

_MEANS: Mapping[str, str] = {
    "grad_norm": "gradient norm before clipping",
    "clip_fraction": "share of tokens clipped",
    "effective_sample_size": "effective sample size",
    "weight_max": "largest weight",
    "implied_kl": "KL of one step, nats",
}
_PLOTTED: Mapping[str, str] = {
    "grad_norm": "Gradient norm before clipping",
    "clip_fraction": "Share of tokens whose weight is bounded",
    "effective_sample_size": "Effective sample size, share of the tokens",
    "implied_kl": "KL that one optimizer step implies, nats",
}
_MOST_POINTS = 200

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Header and rows of a table; the first column is text, the others are numbers."""


def as_tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    """For a terminal; `found` is what `flows.replay.results.collect` returns."""
    for title, sentence, rows in _sections(found):
        if rows is not None:
            header, lines = rows
            made = new_table(title, left=header[:1], right=header[1:])
            for line in lines:
                made.add_row(*(plain(cell) for cell in line))
            yield made
        if sentence:
            yield plain(sentence)


def as_markdown(found: Mapping[str, Any], store: Store) -> str:
    """For an artifact: the same tables, and plots of a comparison; `store` holds the replay's run."""
    parts = []
    for title, sentence, rows in _sections(found):
        parts.append(f"## {title}")
        if sentence:
            parts.append(_escaped(sentence))
        if rows is not None:
            header, lines = rows
            cells = [header, ["---"] * len(header), *lines]
            parts.append("\n".join(f"| {' | '.join(_escaped(cell) for cell in line)} |" for line in cells))
    if "comparison" in found:
        parts += _plots(store)
    return "\n\n".join([*parts, f"All files are in `{store.url}/{layout.REPLAY_RESULTS}/`.\n"])


def _sections(found: Mapping[str, Any]) -> Iterator[tuple[str, str, Rows | None]]:
    if "verdict" in found:
        yield "verdict", found["verdict"]["sentence"], _checkpoints(found["verdict"])
    if "rescored" in found:
        yield from _rescored(found["rescored"])
    if "trained" in found:
        yield "trained on stored trajectories", "", _trained(found["trained"]["runs"])
    if "comparison" in found:
        yield "losses on the same batches", *_compared(found["comparison"])


def _checkpoints(verdict: Mapping[str, Any]) -> Rows | None:
    rows = [
        [str(one["step"]), one["stored_hash"], "same bits" if one["hash"] == one["stored_hash"] else one["hash"]]
        for one in verdict["checkpoints"]
    ]
    return (["checkpoint", "weights as stored", "trained again"], rows) if rows else None


def _rescored(rescored: Mapping[str, Any]) -> Iterator[tuple[str, str, Rows | None]]:
    header = ["source", "rows", "agreed", "rose", "fell", "failed → now", "reward shift"]
    every = {**rescored["by_source"], "all": rescored["total"]}
    rows = [
        [
            source,
            f"{one['rows']:,}",
            _share(one["agreement"]),
            f"{one['rose']:,}",
            f"{one['fell']:,}",
            f"{one['old_failed']:,} → {one['new_failed']:,}",
            "–" if one["shift"] is None else f"{one['shift']:+.4f}",
        ]
        for source, one in every.items()
    ]
    title = f"{rescored['new_reward']} beside {rescored['old_reward']}, as the run was scored"
    unread = rescored["unread"]
    yield title, f"{len(unread)} parts could not be compared: {unread[0]}" if unread else "", (header, rows)


def _trained(runs: Sequence[Mapping[str, Any]]) -> Rows:
    header = ["run", "version", "accuracy", "tokens/s", "trainer busy training"]
    return header, [
        [
            run["run_id"],
            f"{run['steps']:,}",
            "–" if run["accuracy"] is None else f"{run['accuracy']:.3f}",
            "–" if run["tokens_per_second"] is None else f"{run['tokens_per_second']:,.0f}",
            _share(run["train_share"]),
        ]
        for run in runs
    ]


def _compared(comparison: Mapping[str, Any]) -> tuple[str, Rows]:
    means, losses = comparison["means"], comparison["losses"]
    figures = {**_MEANS, **{f"cosine_{loss}": f"cosine of gradients to {loss}" for loss in losses}}
    rows = [
        [title, *(_number(row[name]) for row in means)]
        for name, title in figures.items()
        if any(row[name] is not None for row in means)
    ]
    error = comparison["logprob_error"]
    same = "The weights are the run's own, bit for bit." if error == 0 else ""
    differ = f"The run's own log-probabilities differ by up to {error:.2g} nats: it is not repeated exactly here."
    return same if error is None or error == 0 else differ, (["mean over the steps", *losses], rows)


def _plots(store: Store) -> Iterator[str]:
    comparison = LossComparison(read_table(store, "comparison"))
    for name, title in _PLOTTED.items():
        lines = comparison.series(name)
        longest = max(map(len, lines.values()))
        if longest:
            every = -(-longest // _MOST_POINTS)
            yield line_chart(title, {loss: points[::every] for loss, points in lines.items()})


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _escaped(text: str) -> str:
    """Escapes text of a run for Markdown: it can neither be markup nor end a cell."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>()#+!|~" else c if c.isprintable() else " " for c in text)
