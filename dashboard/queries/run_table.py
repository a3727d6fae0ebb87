"""Filters and sorts the table of all runs.

rows ─► filter: all terms match ─► sort by a column ─► rows of the table

A term is a word that occurs in the run's name, state, note or shown settings, or a comparison: `state=running`,
`reward>0.5`, `training.learning_rate!=1e-5`. Text with spaces needs quotes. Case is ignored.
"""

import operator
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

import numpy as np

from dashboard.queries.series import NO_LINE, ChartLine, mean_of_last
from dashboard.queries.verdict.advice import judge
from dashboard.queries.verdict.facts import Facts
from dashboard.queries.verdict.rules import SEVERITY, Clause, worst
from dashboard.read.model import OverviewRow, Recent

ABSENT = "–"
_CURVE_WINDOW = 8
"""A sparkline averages over an eighth of its versions."""
_TERM = re.compile(r"([^<>=!\s]+)(<=|>=|!=|=|<|>)(.*)", re.DOTALL)
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
Value = str | float | None

_OF_TASK = re.compile(r"(prompts|scoring|environment|sources|evaluation\.weights)\b|reward ")
_NOT_OF_TASK = re.compile(r"\b(shuffle|curriculum_window|replicas|workers|threads|device|demonstrations|where)$")
_TAG = re.compile(r"#[\w.-]+")
PINNED = "#pinned"
"""Tag that keeps a run at the top of the table."""


def attention(row: OverviewRow) -> Clause:
    """Returns the worst clause on a run that its status records alone allow."""
    facts = Facts(
        **{each.name: getattr(row, each.name) for each in fields(Recent)},
        run_url="",
        version=row.policy_version or 0,
        target=row.max_steps,
        doing=dict.fromkeys(row.ages, "see its page"),
        silent=row.ages if row.state == "running" else {},
        problems=row.missing,
    )
    return worst(judge(facts).clauses)


def severity(row: OverviewRow) -> int:
    """Returns the severity of the worst clause; a run that can't be read is bad."""
    return SEVERITY["bad"] if row.problem else SEVERITY[attention(row).level]


def busiest(row: OverviewRow) -> tuple[str, float] | None:
    """Returns the stage with the largest busy share, and the share: there the time goes."""
    stage = min(row.idle, key=lambda name: row.idle[name], default=None)
    return None if stage is None else (stage, 1 - row.idle[stage])


def tags(row: OverviewRow) -> list[str]:
    """Returns the words of the note that start with #."""
    return _TAG.findall(row.note)


def predecessors(rows: Sequence[OverviewRow]) -> dict[str, OverviewRow]:
    """Run id → the latest run of the same task that started before it; absent without one."""
    latest, before = dict[object, OverviewRow](), dict[str, OverviewRow]()
    for row in sorted((row for row in rows if row.problem is None), key=lambda row: row.t_started or 0.0):
        asked = task(row.settings, row.inputs)
        if asked in latest:
            before[row.run_id] = latest[asked]
        latest[asked] = row
    return before


def task(settings: Mapping[str, str], inputs: Mapping[str, str]) -> object:
    """Returns the settings and contents on which an accuracy depends: held-out prompts, conversation, reward."""
    named = [*settings.items(), *inputs.items()]
    return frozenset((key, value) for key, value in named if _OF_TASK.match(key) and not _NOT_OF_TASK.search(key))


def interval(row: OverviewRow) -> tuple[float, float] | None:
    """Returns the ends of the accuracy's 95 % interval; None if they are unknown."""
    low, high = row.accuracy_interval or (None, None)
    return None if low is None or high is None else (low, high)


def seeds(rows: Sequence[OverviewRow]) -> list[list[OverviewRow]]:
    """Returns groups of two or more evaluated runs with the same settings, but for seed, name and addresses."""
    groups: dict[tuple[tuple[str, str], ...], list[OverviewRow]] = {}
    for row in rows:
        if row.accuracy is not None:
            groups.setdefault(decisive(row.settings), []).append(row)
    return [group for group in groups.values() if len(group) > 1]


def decisive(settings: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns the settings without seeds, names and addresses: runs with the same ones learn the same on average."""
    return tuple(sorted((name, value) for name, value in settings.items() if not is_incidental(name)))


def is_incidental(key: str) -> bool:
    """Whether a setting names a seed, an address or a run, and so does not change the result on average.

    The path of a model does: another model may be there.
    """
    return key.rpartition(".")[2] in ("seed", "name", "url", "root", "port")


FIELDS: Mapping[str, Callable[[OverviewRow], Value]] = {
    "run": lambda row: row.run_id,
    "attention": severity,
    "state": lambda row: row.state,
    "step": lambda row: row.policy_version,
    "reward": lambda row: row.reward_mean,
    "accuracy": lambda row: row.accuracy,
    "staleness": lambda row: row.staleness_mean,
    "bound": lambda row: row.max_staleness,
    "started": lambda row: row.t_started,
    "hours": lambda row: None if row.wall_seconds is None else row.wall_seconds / 3600,
    "note": lambda row: row.note,
}
"""Fields to sort and filter by, in addition to the keys of the config."""


def differing(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the sorted keys whose values are not the same in all `configs`."""
    keys = sorted(set().union(*configs))
    return [key for key in keys if len({config.get(key) for config in configs}) > 1]


def chosen(rows: Sequence[OverviewRow], text: str, columns: Sequence[str]) -> list[OverviewRow]:
    """Returns the rows that match every term of `text`; `columns` are the shown config keys."""
    terms = _terms(text)
    return [row for row in rows if _holds(row, terms, columns)] if terms else list(rows)


def ordered(rows: Sequence[OverviewRow], sort: str) -> list[OverviewRow]:
    """Sorts by the field or key `sort`, descending after a `-`: numbers first, then text, then unknown values."""
    name = sort.removeprefix("-")
    with_value = [(value, row) for row in rows if (value := value_of(row, name)) is not None and value != ""]
    numbers = [(value, row) for value, row in with_value if not isinstance(value, str)]
    words = [(value.casefold(), row) for value, row in with_value if isinstance(value, str)]
    down = sort.startswith("-")
    by_value = operator.itemgetter(0)
    sorted_rows = [
        row for _, row in [*sorted(numbers, key=by_value, reverse=down), *sorted(words, key=by_value, reverse=down)]
    ]
    ids = {row.run_id for row in sorted_rows}
    shown = [*sorted_rows, *(row for row in rows if row.run_id not in ids)]
    return sorted(shown, key=lambda row: PINNED not in tags(row))


def value_of(row: OverviewRow, name: str) -> Value:
    """Returns a field or setting of a run, numeric settings as numbers; None if unknown."""
    if name in FIELDS:
        return FIELDS[name](row)
    text = row.settings.get(name)
    number = _number(text)
    return text if number is None else number


def curve(row: OverviewRow) -> tuple[str, ChartLine]:
    """Returns the name and the line of the sparkline: the smoothed reward if it has one, otherwise the accuracy."""
    if len(row.rewards) >= 2 and not row.is_supervised:
        line = ChartLine(*np.array(row.rewards, np.float64).T)
        return "reward", mean_of_last(line, np.ptp(line.x) / _CURVE_WINDOW)
    if len(row.accuracies) >= 2:
        versions, values = np.array(row.accuracies, np.float64).T
        return "accuracy", ChartLine(versions, values)
    return "reward", NO_LINE


def _terms(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        # An unclosed quote.
        return text.split()


def _holds(row: OverviewRow, terms: Sequence[str], columns: Sequence[str]) -> bool:
    words = [row.run_id, row.state or "", row.note, row.problem or "", *(row.settings.get(key, "") for key in columns)]
    text = "\n".join(words).casefold()
    for term in terms:
        compared = _TERM.fullmatch(term)
        if compared is None:
            if term.casefold() not in text:
                return False
        elif not _compares(value_of(row, compared[1]), compared[2], compared[3]):
            return False
    return True


def _compares(value: Value, sign: str, text: str) -> bool:
    if value is None:
        return sign == "!="
    number = _number(text)
    if sign in ("=", "!="):
        same = value == number if not isinstance(value, str) else value.casefold() == text.casefold()
        return same == (sign == "=")
    return not isinstance(value, str) and number is not None and _COMPARISONS[sign](value, number)


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None
