"""The newest groups of a run as a view of tables, for the exported file: there, nobody can ask the store for others."""

from dashboard.blocks import Rows, Table, View
from dashboard.data import RunData
from dashboard.groups import Group, GroupReader, Response
from dashboard.search import find, parse
from dashboard.tokens import TokenTexts, read_tokens, visible
from millrace.errors import InputError
from storage.errors import StorageError
from storage.factory import open_store

MOST_GROUPS = 20
_MOST_RESPONSES = 64
"""Of one group."""
_MOST_CHARACTERS = 2000
"""Of one response."""
_HEADER = ("row", "outcome", "staleness", "versions", "reward", "advantage", "tokens", "finish", "response")


def newest_groups(run: RunData) -> View:
    """The last groups that the trainer took: prompt, responses, rewards, versions. What can't be read is said there."""
    store = open_store(run.facts.url)
    reader, texts = GroupReader(store, run.facts.config), read_tokens(store, run.facts.config)
    found = find(run.consumed, run.outcomes, parse({}))
    rows = found.starts[:MOST_GROUPS].tolist()
    places = [(int(run.consumed["generator"][i]), int(run.consumed["trajectory_row_id"][i])) for i in rows]
    run_id = run.facts.run_id
    return View(
        name=f"trajectories-{run_id}",
        title="Trajectories" if places else "Trajectories: none was taken yet",
        sentence=f"The newest {len(places)} groups that the trainer of {run_id} took, the newest first."
        + (f" Token ids instead of texts: {texts.note}" if texts.note else ""),
        blocks=[_block(run, reader, texts, *place) for place in places],
    )


def _block(run: RunData, reader: GroupReader, texts: TokenTexts, generator: int, row: int) -> Table:
    try:
        group: Group | None = reader.read(run, generator, row)
        problems = list(group.problems) if group is not None else []
    except (StorageError, InputError) as error:
        group, problems = None, [str(error)]
    responses = group.responses if group is not None else ()
    told = Rows(
        header=_HEADER,
        rows=[_row(response, texts) for response in responses[:_MOST_RESPONSES]],
        note=" ".join([_prompt(group, texts), *map(visible, problems)]),
    )
    return Table(
        id=f"group-{run.facts.run_id}-{generator}-{row}",
        title=f"Group {group.group_id}" if group is not None and group.group_id >= 0 else "A group that can't be read",
        sentence=f"Made by generator {generator}, from row {row:,} of its stream on.",
        build=lambda runs: told,
        wide=True,
    )


def _prompt(group: Group | None, texts: TokenTexts) -> str:
    if group is None or group.prompt is None:
        return "Of its prompt nothing can be read."
    text = _cut(visible(texts.text(group.prompt["prompt_tokens"])))
    return f"Prompt {visible(group.prompt['prompt_id'])}: {text} ({_cut(visible(group.prompt['meta']))})"


def _row(response: Response, texts: TokenTexts) -> tuple[str, ...]:
    taken, trajectory, score = response.taken or {}, response.trajectory or {}, response.score or {}
    tokens = trajectory.get("response_tokens")
    return (
        f"{response.row_id:,}",
        visible(taken.get("outcome", "not taken yet")),
        str(taken.get("staleness", "")),
        f"{trajectory['min_policy_version']} to {trajectory['max_policy_version']}" if trajectory else "",
        _number(score.get("reward")),
        _number(taken.get("advantage")),
        "" if tokens is None else f"{len(tokens):,}",
        visible(trajectory.get("finish_reason", "")),
        "can't be read" if tokens is None else _cut(visible(texts.text(tokens))),
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}… ({len(text):,} characters)"
