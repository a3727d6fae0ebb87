"""`millrace show` and `millrace diff`: their command lines, and what they print."""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.text import Text

from flows.display.terminal import local_time, new_table, plain

if TYPE_CHECKING:
    from millrace.replay.diff import Diff, Difference, FirstDifference
    from millrace.replay.show import RatioSummary, ShownGroup, ShownStep

DIFFERENT = 1
"""Exit code if two runs differ."""
_DASHBOARD_URL = "MILLRACE_DASHBOARD_URL"
_GROUPS_SHOWN = 20
_PROMPT_WIDTH = 12
_VALUE_WIDTH = 60
_SECTIONS = ("pipeline", "training", "staleness", "generation", "scoring")
"""Sections of the config that matter for a single step."""


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds both commands."""
    show = _command(commands, "show", "show what the trainer saw at one step: batch, staleness, ratios, numbers")
    show.add_argument("run_url", metavar="RUN_URL", help="folder or URL of the run: ROOT/RUN_ID")
    show.add_argument("--step", type=int, required=True, metavar="N", help="the step that made policy version N")
    diff = _command(
        commands, "diff", "find where two runs first differ, from config to data to loss; exit code 1 if they do"
    )
    diff.add_argument("run_a", metavar="RUN_A", help="folder or URL of a run")
    diff.add_argument("run_b", metavar="RUN_B", help="… and of another")


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Runs one of the two; returns its exit code. Raises InputError for a mistake, StorageError for damage."""
    from storage.stores.factory import open_store

    console = console or Console()
    found: Diff | ShownStep
    if arguments.command == "show":
        from millrace.replay.show import show

        found = show(open_store(arguments.run_url), arguments.step, dashboard_url=os.environ.get(_DASHBOARD_URL))
        lines, code = format_step(found), 0
    else:
        from millrace.replay.diff import diff

        found = diff(open_store(arguments.run_a), open_store(arguments.run_b))
        lines, code = format_diff(found), DIFFERENT if found.batch or found.numbers else 0
    if arguments.json:
        print(json.dumps(asdict(found), indent=1))
        return code
    for line in lines:
        console.print(line, soft_wrap=isinstance(line, Text))
    return code


def format_step(shown: "ShownStep") -> Iterator[RenderableType]:
    """One step as printed, piece by piece."""
    trajectories = sum(len(group.rewards) for group in shown.groups)
    tokens = sum(sum(group.lengths) for group in shown.groups)
    yield plain(
        f"step {shown.step} of run {shown.run_id} at {shown.run_url}: version {shown.step - 1} became {shown.step} at "
        f"{local_time(shown.t)}, incarnation {shown.incarnation}, attempt {shown.attempt}"
    )
    lags = "  ".join(f"{staleness}: {count:,}" for staleness, count in shown.staleness.items())
    yield plain(
        f"{len(shown.groups):,} groups, {trajectories:,} trajectories, {tokens:,} tokens; by staleness:  {lags}"
    )
    if shown.dropped:
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in shown.dropped.items())
        yield plain(f"dropped before this step: {dropped}")
    yield _batch(shown.groups)
    yield _numbers(shown)
    yield _config(shown.config)
    if shown.evaluation is not None:
        accuracy, prompts = shown.evaluation["accuracy"], shown.evaluation["prompts"]
        said = "was not scored" if accuracy is None else f"is right on {accuracy:.1%} of {prompts:,} held-out prompts"
        yield plain(f"version {shown.step} {said}")
    if shown.dashboard is not None:
        yield plain(f"its trajectories: {shown.dashboard}")


def format_diff(diff: "Diff") -> Iterator[RenderableType]:
    """The comparison of two runs as printed, from config to data to loss."""
    yield plain(f"A  {diff.run_a}")
    yield plain(f"B  {diff.run_b}")
    for title, differences in (
        ("config", diff.config),
        ("provenance", diff.provenance),
        ("start model and tokenizer, SHA-256", diff.start),
    ):
        if differences:
            yield _differences(title, differences)
        else:
            yield plain(f"{title}: no difference known")
    for what, difference in (("they trained on", diff.batch), ("came out", diff.numbers)):
        if difference is not None:
            yield _first_difference(what, difference)
    if diff.checkpoints_differing:
        versions = ", ".join(map(str, diff.checkpoints_differing))
        yield plain(f"checkpoints whose weights differ, of {len(diff.checkpoints)} that both have: {versions}")
    yield plain(diff.sentence, "bold")


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, what: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    return parser


def _batch(groups: "Sequence[ShownGroup]") -> RenderableType:
    some = f", the first {_GROUPS_SHOWN} of {len(groups):,}; --json gives all" if len(groups) > _GROUPS_SHOWN else ""
    made = new_table(
        f"batch{some}",
        left=("group", "prompt"),
        right=("gen", "versions", "stale", "reward", "advantages", "tokens", "π/μ", "max"),
    )
    for group in groups[:_GROUPS_SHOWN]:
        known = [reward for reward in group.rewards if reward is not None]
        weights = [advantage for advantage in group.advantages if advantage is not None]
        prompt = plain(group.prompt[: _PROMPT_WIDTH + 1])
        prompt.truncate(_PROMPT_WIDTH, overflow="ellipsis")
        made.add_row(
            str(group.group_id),
            prompt,
            str(group.generator),
            _range(group.min_policy_version, group.max_policy_version),
            str(group.staleness),
            f"{sum(known) / len(known):.2f}",
            f"{min(weights):+.2f} {max(weights):+.2f}",
            f"{sum(group.lengths) / len(group.lengths):.1f}",
            f"{group.ratios.mean:.2f}",
            f"{group.ratios.max:.2f}",
        )
    return made


def _numbers(shown: "ShownStep") -> RenderableType:
    made = new_table("numbers", left=("what",), right=("value",))
    for name, value in _ratios(shown.ratios):
        made.add_row(plain(name), f"{value:.6g}")
    for name, value in shown.measured.items():
        if not name.startswith("importance_ratio_"):
            made.add_row(plain(name), f"{value:.6g}")
    return made


def _ratios(ratios: "RatioSummary") -> list[tuple[str, float]]:
    return [(f"importance_ratio_{name}", value) for name, value in asdict(ratios).items()]


def _config(config: dict[str, Any]) -> RenderableType:
    made = new_table("config in force; --json gives all of it", left=("key", "value"), right=())
    for section in _SECTIONS:
        for name, value in config.get(section, {}).items():
            made.add_row(plain(f"{section}.{name}"), plain(_short(value)))
    return made


def _differences(title: str, differences: "Sequence[Difference]") -> RenderableType:
    made = new_table(title, left=("what", "A", "B"), right=())
    for difference in differences:
        made.add_row(plain(difference.name), plain(_short(difference.a)), plain(_short(difference.b)))
    return made


def _first_difference(what: str, found: "FirstDifference") -> RenderableType:
    made = new_table(f"first difference in what {what}: step {found.step}", left=("what", "where", "A", "B"), right=())
    made.add_row(found.what, found.where, plain(_short(found.a)), plain(_short(found.b)))
    return made


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _VALUE_WIDTH else f"{text[: _VALUE_WIDTH - 1]}…"
