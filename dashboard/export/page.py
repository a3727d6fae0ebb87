"""All views of a run, or of several side by side, as one HTML file: for a mail, a ticket, an archive.

    views ─► blocks ─┬─ tables ─► escaped text ───────────────────────┐
                     └─ charts ─► JSON in <script type=application/json> ├─► one self-contained file
    plotly.min.js, style.css, starter ────────────────────────────────┘

Only the two scripts whose hashes are in the file's policy can run, and nothing is fetched: `default-src 'none'`. Text
from a store stays text, in the page and in its JSON. The newest groups are tables: the file has no store to read from.
"""

import base64
import hashlib
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from dashboard.read.groups import Group, GroupReader, StoredResponse
from dashboard.read.model import RunData
from dashboard.read.search import Query, find
from dashboard.read.tokens import TokenTexts, read_tokens, shortened, visible
from dashboard.views.blocks import Block, Chart, Rows, Table, View
from dashboard.views.figures import PLOTLY_FILE
from millrace.errors import InputError, writing
from storage.errors import StorageError
from storage.stores.factory import open_store

MOST_GROUPS = 20
_MOST_RESPONSES = 64
"""Per group."""
_MOST_CHARACTERS = 2000
"""Per response."""
_HEADER = ("row", "outcome", "staleness", "versions", "reward", "advantage", "tokens", "finish", "response")
_STYLE = Path(__file__).parents[1] / "assets" / "style.css"
_STARTER = """
for (const json of document.querySelectorAll('script[type="application/json"]')) {
  const figure = JSON.parse(json.textContent);
  Plotly.newPlot(json.dataset.chart, figure.data, figure.layout, {displaylogo: false, responsive: true});
}
"""
_OWN_STYLE = """
.chart { min-height: 380px; }
main > section { margin-bottom: 40px; }
@media print { .block { break-inside: avoid; } .table { max-height: none; } }
"""


def export(runs: Sequence[RunData], views: Sequence[View], path: Path) -> None:
    """Writes `views` of at least one run to the file `path` atomically. Raises InputError if it can't be written."""
    if path.is_dir():
        raise InputError("is a folder", file=path, expected="the name of a file to write")
    data = page(runs, views, datetime.now(UTC)).encode()
    written = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with writing(path):
        try:
            written.write_bytes(data)
            written.replace(path)
        finally:
            written.unlink(missing_ok=True)


def page(runs: Sequence[RunData], views: Sequence[View], made: datetime) -> str:
    """Returns the HTML; `made` is the time of creation, with a time zone."""
    title = f"Millrace: {', '.join(run.info.run_id for run in runs)}"
    plotly = PLOTLY_FILE.read_text()
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(plotly, _STARTER)}">',
            '<meta name="viewport" content="width=device-width">\n<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE.read_text()}{_OWN_STYLE}</style>",
            "</head>\n<body>",
            *_header(runs, views, title, made),
            "<main>",
            *(part for view in views for part in _view(view, runs)),
            f"</main>\n<script>{plotly}</script>\n<script>{_STARTER}</script>\n</body>\n</html>\n",
        ]
    )


def _policy(*scripts: str) -> str:
    """Returns a content security policy that allows these scripts and the images that Plotly creates for download."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"


def _header(runs: Sequence[RunData], views: Sequence[View], title: str, made: datetime) -> Iterator[str]:
    yield f"<header>\n<h1>{escape(title)}</h1>"
    yield f'<p class="sentence">Written {made:%Y-%m-%d %H:%M:%S %Z}; it does not update.</p>'
    header = ("run", "state", "steps", "as of", "at")
    facts = [_facts(run) for run in runs]
    yield f'<div class="table">{_table(Rows(header=header, rows=facts))}</div>'
    problems = [f"{run.info.run_id}: {problem}" for run in runs for problem in run.problems]
    if problems:
        yield '<div class="problems" role="alert">'
        yield from (f"<p>{escape(problem)}</p>" for problem in problems)
        yield "</div>"
    links = "\n".join(f'<a href="#{escape(view.name)}">{escape(view.title)}</a>' for view in views)
    yield f"<nav>\n{links}\n</nav>\n</header>"


def _facts(run: RunData) -> Sequence[str]:
    status = run.status or {}
    steps = f"{status['steps']:,} of {status['max_steps']:,}" if status else "not known"
    moment = f"{datetime.fromtimestamp(run.t, UTC):%Y-%m-%d %H:%M:%S %Z}"
    return run.info.run_id, str(status.get("state", "not known")), steps, moment, run.info.url


def _view(view: View, runs: Sequence[RunData]) -> Iterator[str]:
    yield f'<section id="{escape(view.name)}">\n<h1>{escape(view.title)}</h1>'
    yield f'<p class="sentence">{escape(view.sentence)}</p>\n<div class="grid">'
    for block in view.blocks_for(runs):
        yield _block(block, runs)
    yield "</div>\n</section>"


def _block(block: Block, runs: Sequence[RunData]) -> str:
    if isinstance(block, Chart):
        chart = f"chart-{escape(block.id)}"
        json = _inside_script(block.build(runs).to_json())
        inside = (
            f'<div class="chart" id="{chart}"></div>\n'
            f'<script type="application/json" data-chart="{chart}">{json}</script>'
        )
    else:
        inside = f'<div class="table">{_table(block.build(runs))}</div>'
    return (
        f'<section id="{escape(block.id)}" class="block{" wide" if block.wide else ""}">\n'
        f"<h2>{escape(block.title)}</h2>\n"
        f'<p class="sentence">{escape(block.sentence)}</p>\n{inside}\n</section>'
    )


def _table(rows: Rows) -> str:
    parts = []
    if rows.verdict is not None:
        parts.append(f'<p class="verdict {escape(rows.verdict)}">{escape(rows.verdict)}</p>')
    if rows.note:
        parts.append(f'<p class="note">{escape(rows.note)}</p>')
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in rows.header)
    body = "\n".join(f"<tr>{''.join(map(_cell, row, rows.header))}</tr>" for row in rows.rows)
    parts.append(f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>")
    return "\n".join(parts)


def _cell(text: str, name: str) -> str:
    return f'<td data-label="{escape(name)}">{escape(text)}</td>'


def _inside_script(json: str) -> str:
    """Escapes characters that could end the surrounding script element or begin a comment."""
    return json.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


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
        blocks=[_group_table(run, reader, texts, generator, row) for generator, row in first_rows],
    )


def _group_table(run: RunData, reader: GroupReader, texts: TokenTexts, generator: int, row: int) -> Table:
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
