"""`millrace show` and `millrace diff`: one step of a run, and where two runs first differ."""

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from flows.cli.command_line import JSON, RUN_URL, Command, count, option
from flows.display.tables import echo, local_time, new_table, plain, shortened
from storage.stores.factory import open_store

DIFFERENT = 1
"""Exit code if two runs differ."""
_GROUPS_SHOWN = 20
_PROMPT_WIDTH = 12
_VALUE_WIDTH = 60


def _show(arguments: argparse.Namespace) -> int:
    from dashboard.read.tokens import read_tokens
    from millrace.replay.show import show

    store = open_store(arguments.run_url)
    shown = show(store, arguments.step, dashboard_url=os.environ.get("MILLRACE_DASHBOARD_URL"))
    tokens = read_tokens(store, shown["config"])
    for group in shown["groups"]:
        group["responses"] = [tokens.text(ids) for ids in group.pop("response_tokens")]
    if arguments.json:
        print(json.dumps(shown, indent=1))
    else:
        echo(*_step(shown))
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    from millrace.replay.diff import diff

    difference = diff(open_store(arguments.run_a), open_store(arguments.run_b))
    if arguments.json:
        print(json.dumps(difference, indent=1))
    else:
        echo(*_comparison(difference))
    return DIFFERENT if difference["batch"] or difference["numbers"] else 0


def _step(shown: Mapping[str, Any]) -> Iterator[RenderableType]:
    trajectories = sum(len(group["rewards"]) for group in shown["groups"])
    tokens = sum(sum(group["lengths"]) for group in shown["groups"])
    step = shown["step"]
    yield (
        f"step {step} of run {shown['run_id']} at {shown['run_url']}: version {step - 1} became {step} at "
        f"{local_time(shown['t'])}, incarnation {shown['incarnation']}, attempt {shown['attempt']}"
    )
    by_lag = Counter(group["staleness"] for group in shown["groups"])
    lags = "  ".join(f"{lag}: {number:,}" for lag, number in sorted(by_lag.items()))
    yield f"{len(shown['groups']):,} groups, {trajectories:,} trajectories, {tokens:,} tokens; by staleness:  {lags}"
    if shown["dropped"]:
        yield f"dropped before this step: {', '.join(f'{n:,} {reason}' for reason, n in shown['dropped'].items())}"
    omitted = len(shown["groups"]) > _GROUPS_SHOWN
    some = f", the first {_GROUPS_SHOWN} of {len(shown['groups']):,}; --json gives all" if omitted else ""
    with_source = len({group["source"] for group in shown["groups"]}) > 1
    batch = new_table(
        f"batch{some}",
        left=("group", *(("source",) if with_source else ()), "prompt"),
        right=("gen", "versions", "stale", "reward", "advantages", "tokens", "π/μ", "max"),
        rows=(_group(group, with_source=with_source) for group in shown["groups"][:_GROUPS_SHOWN]),
    )
    if with_source:
        # So that it fits into 80 columns.
        batch.padding = 0
    yield batch
    rows = [row for group in shown["groups"][:_GROUPS_SHOWN] for row in _responses(group)]
    yield new_table("best and worst response", left=("group", "response"), right=("reward",), rows=rows)
    numbers = {f"importance_ratio_{name}": value for name, value in shown["ratios"].items()}
    numbers |= {name: value for name, value in shown["measured"].items() if name not in numbers}
    rows = [(name, f"{value:.6g}") for name, value in numbers.items()]
    yield new_table("numbers", left=("what",), right=("value",), rows=rows)
    if shown["evaluation"] is not None:
        accuracy, prompts = shown["evaluation"]["accuracy"], shown["evaluation"]["prompts"]
        right = "was not scored" if accuracy is None else f"is right on {accuracy:.1%} of {prompts:,} held-out prompts"
        yield f"version {step} {right}"
    if shown["dashboard"] is not None:
        yield f"its trajectories: {shown['dashboard']}"


def _group(group: Mapping[str, Any], *, with_source: bool) -> Sequence[Any]:
    rewards = [reward for reward in group["rewards"] if reward is not None]
    advantages = [advantage for advantage in group["advantages"] if advantage is not None]
    first, last = group["min_policy_version"], group["max_policy_version"]
    return (
        str(group["group_id"]),
        *((shortened(group["source"], _PROMPT_WIDTH),) if with_source else ()),
        shortened(group["prompt"], _PROMPT_WIDTH),
        str(group["generator"]),
        str(first) if first == last else f"{first}–{last}",
        str(group["staleness"]),
        f"{sum(rewards) / len(rewards):.2f}",
        f"{min(advantages):+.2f} {max(advantages):+.2f}",
        f"{sum(group['lengths']) / len(group['lengths']):.1f}",
        f"{group['ratios']['mean']:.2f}",
        f"{group['ratios']['max']:.2f}",
    )


def _responses(group: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    """Yields the best response of a group, and the worst one if its reward is lower."""
    scored = [pair for pair in zip(group["rewards"], group["responses"], strict=True) if pair[0] is not None]
    best, worst = max(scored, key=lambda pair: pair[0]), min(scored, key=lambda pair: pair[0])
    for reward, response in (best, worst) if worst[0] < best[0] else (best,):
        yield str(group["group_id"]), shortened(response, _VALUE_WIDTH), f"{reward:.2f}"


def _comparison(diff: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yields the differences from config to data to loss."""
    yield f"A  {diff['run_a']}"
    yield f"B  {diff['run_b']}"
    for title, differences in (
        ("config", diff["config"]),
        ("provenance", diff["provenance"]),
        ("start model and tokenizer, SHA-256", diff["start"]),
    ):
        rows = [(difference["name"], _short(difference["a"]), _short(difference["b"])) for difference in differences]
        yield new_table(title, left=("what", "A", "B"), rows=rows) if rows else f"{title}: no difference known"
    for what, first in (("they trained on", diff["batch"]), ("came out", diff["numbers"])):
        if first is not None:
            title = f"first difference in what {what}: step {first['step']}"
            row = (first["what"], first["where"], _short(first["a"]), _short(first["b"]))
            yield new_table(title, left=("what", "where", "A", "B"), rows=[row])
    if diff["checkpoints_differing"]:
        versions = ", ".join(map(str, diff["checkpoints_differing"]))
        yield f"checkpoints whose weights differ, of {len(diff['checkpoints'])} that both have: {versions}"
    yield plain(diff["sentence"], "bold")


def _short(value: Any) -> Text:
    return shortened(json.dumps(value), _VALUE_WIDTH)


_STEP = option("--step", type=count, required=True, metavar="N", help="the step that made policy version N")
_RUN_A = option("run_a", metavar="RUN_A", help="folder or URL of a run")
_RUN_B = option("run_b", metavar="RUN_B", help="… and of another")
COMMANDS = [
    Command(
        "show", _show, "show one step as the trainer saw it: batch, staleness, ratios, numbers", [JSON, RUN_URL, _STEP]
    ),
    Command(
        "diff",
        _diff,
        "find where two runs first differ, from config to data to loss; exit code 1 if they do",
        [JSON, _RUN_A, _RUN_B],
    ),
]
