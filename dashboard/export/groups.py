"""The newest groups of a run as tables, for the exported file, which has no store to read other groups from."""

from dashboard.read.groups import Group, GroupReader, StoredResponse
from dashboard.read.model import RunData
from dashboard.read.search import Query, find
from dashboard.read.tokens import TokenTexts, read_tokens, shortened, visible
from dashboard.views.blocks import Rows, Table, View
from millrace.errors import InputError
from storage.errors import StorageError
from storage.stores.factory import open_store

MOST_GROUPS = 20
_MOST_RESPONSES = 64
"""Per group."""
_MOST_CHARACTERS = 2000
"""Per response."""
_HEADER = ("row", "outcome", "staleness", "versions", "reward", "advantage", "tokens", "finish", "response")


def newest_groups(run: RunData) -> View:
    """Shows the last groups that the trainer took: prompts, responses, rewards, versions and read errors."""
    store = open_store(run.info.url)
    reader, texts = GroupReader(store, run.info.config), read_tokens(store, run.info.config)
    result = find(run.consumed, Query())
    first_rows = [run.consumed.place(start) for start in result.starts[:MOST_GROUPS]]
    run_id = run.info.run_id
    return View(
        name=f"trajectories-{run_id}",
        title="Trajectories" if first_rows else "Trajectories: none was taken yet",
        sentence=f"The newest {len(first_rows)} groups that the trainer of {run_id} took, the newest first."
        + (f" {texts.note}" if texts.note else ""),
        blocks=[_block(run, reader, texts, generator, row) for generator, row in first_rows],
    )


def _block(run: RunData, reader: GroupReader, texts: TokenTexts, generator: int, row: int) -> Table:
    group: Group | None = None
    try:
        group = reader.read(run, generator, row)
        problems = group.problems
    except (StorageError, InputError) as error:
        problems = (str(error),)
    rows = Rows(
        header=_HEADER,
        rows=[_row(response, texts) for response in (group.responses[:_MOST_RESPONSES] if group else ())],
        note=" ".join([_prompt(group, texts), *map(visible, problems)]),
    )
    return Table(
        id=f"group-{run.info.run_id}-{generator}-{row}",
        title=f"Group {group.group_id}" if group is not None and group.group_id >= 0 else "A group that can't be read",
        sentence=f"Made by generator {generator}, starting at row {row:,} of its stream.",
        build=lambda runs: rows,
        wide=True,
    )


def _prompt(group: Group | None, texts: TokenTexts) -> str:
    if group is None or group.prompt is None:
        return "Its prompt can't be read."
    text, meta = _short(texts.text(group.prompt["prompt_tokens"])), _short(group.prompt["meta"])
    return f"Prompt {visible(group.prompt['prompt_id'])}: {text} ({meta})"


def _row(response: StoredResponse, texts: TokenTexts) -> tuple[str, ...]:
    consumed, trajectory, score = response.consumed or {}, response.trajectory or {}, response.score or {}
    tokens = trajectory.get("response_tokens")
    return (
        f"{response.row_id:,}",
        visible(consumed.get("outcome", "not taken yet")),
        str(consumed.get("staleness", "")),
        f"{trajectory['min_policy_version']} to {trajectory['max_policy_version']}" if trajectory else "",
        _number(score.get("reward")),
        _number(consumed.get("advantage")),
        "" if tokens is None else f"{len(tokens):,}",
        visible(trajectory.get("finish_reason", "")),
        "can't be read" if tokens is None else _short(texts.text(tokens)),
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _short(text: str) -> str:
    return shortened(visible(text), _MOST_CHARACTERS)
