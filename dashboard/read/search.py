"""Search for groups: from typed text or a link to rows of `RunData.consumed`.

    ?group=12&staleness=2..&order=highest ──► parse ──► Query ──► find ──► groups, one page at a time
              ▲                                 │ too long or malformed       ▲
              └──────────── address ◄───────────┴─► one sentence              │
                                     text ──► `GroupReader.find_text`, of the newest groups

A group matches if any of its trajectories meets all conditions.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import parse_qsl, urlencode

import numpy as np
import numpy.typing as npt

from dashboard.read.model import Columns, Consumed, RunData
from millrace.errors import InputError

PAGE_SIZE = 25
"""Groups per page."""
MAX_CHARACTERS = 200
"""Characters per field."""
Order = Literal["newest", "live", "highest", "lowest"]
Colouring = Literal["ratio", "logprob", "entropy", "advantage"]
"""Value that the colour of a token shows: π/μ, log μ, entropy, or its response's advantage."""
_NOTHING = (None, None)
_ALL = "all"
_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True, kw_only=True)
class Query:
    """Conditions on a group. A range is its first and last number; None means no limit."""

    group: int | None = None
    text: str = ""
    """Part of the prompt's name, of the prompt or of a response, case-insensitive."""
    generator: int | None = None
    outcome: str = ""
    """trained, or a drop_reason."""
    source: str = ""
    version: tuple[int | None, int | None] = _NOTHING
    """Policy version made by the step that took the group."""
    staleness: tuple[int | None, int | None] = _NOTHING
    """Policy versions."""
    reward: tuple[float | None, float | None] = _NOTHING
    order: Order = "newest"
    """Newest first (`live`: as they come), or by highest or lowest mean reward; groups without a reward are last."""
    page: int = 0
    """Page number from 0."""
    open: tuple[int, int] | None = None
    """The group to show: its generator, and one of its row_ids."""
    versions: bool = False
    """Whether to show all groups with the prompt of the open group instead."""
    colour: Colouring = "ratio"


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchResult:
    """Groups in the requested order: group i has the rows starts[i] to ends[i] − 1 of `RunData.consumed`."""

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def of(self, chosen: Collection[int]) -> "SearchResult":
        """Returns the groups with these starts alone, in the same order."""
        kept = np.isin(self.starts, list(chosen))
        return SearchResult(starts=self.starts[kept], ends=self.ends[kept])

    def page(self, number: int) -> list[tuple[int, int]]:
        """Returns start and end of each group on a page."""
        shown = slice(number * PAGE_SIZE, (number + 1) * PAGE_SIZE)
        return list(zip(self.starts[shown].tolist(), self.ends[shown].tolist(), strict=True))


def from_address(search: str) -> Query:
    """Parses the query in an address, such as `?group=123`; ignores other parameters. Raises InputError."""
    try:
        values = dict(parse_qsl(search.removeprefix("?"), max_num_fields=50))
    except ValueError as error:
        raise InputError(f"the address has too many fields: {error}", expected="at most 50") from error
    return parse({name: value for name, value in values.items() if name in _PARSERS})


def parse(values: Mapping[str, str]) -> Query:
    """Parses the text of each field. Raises InputError with the field as `key`."""
    typed = {name: value.strip() for name, value in values.items() if value.strip()}
    for name, text in typed.items():
        if len(text) > MAX_CHARACTERS:
            raise InputError(f"{len(text):,} characters long", key=name, expected=f"at most {MAX_CHARACTERS}")
    return Query(**{name: _PARSERS[name](name, text) for name, text in typed.items()})


def typed(query: Query) -> dict[str, str]:
    """Returns the field texts that `parse` turns into this query, without defaults."""
    return {
        name: _typed(name, value)
        for name, value in vars(query).items()
        if value != Query.__dataclass_fields__[name].default
    }


def address(query: Query) -> str:
    """Returns the query as part of an address; `?` for the default."""
    return f"?{urlencode(typed(query))}"


def find(consumed: Consumed, query: Query) -> SearchResult:
    """Finds the groups that meet the query, except for its text. Raises InputError for an unknown outcome or source."""
    starts, ends = _groups(consumed)
    if len(starts) == 0:
        return SearchResult(starts=starts, ends=ends)
    rows = _meeting(consumed, query)
    chosen = np.ones(len(starts), bool) if rows is None else np.logical_or.reduceat(rows, starts)
    # Newest first; a stable sort by reward keeps this order among equal rewards and puts NaN last.
    starts_chosen, ends_chosen = starts[chosen][::-1], ends[chosen][::-1]
    if query.order in ("newest", "live"):
        return SearchResult(starts=starts_chosen, ends=ends_chosen)
    means = mean_rewards(consumed["reward"], starts)[0][chosen][::-1]
    order = np.argsort(-means if query.order == "highest" else means, kind="stable")
    return SearchResult(starts=starts_chosen[order], ends=ends_chosen[order])


def groups_of_prompt(run: RunData, source: str, prompt_id: str) -> list[tuple[int, int]]:
    """Returns generator and first row_id of each group with this prompt that the trainer took, by policy version."""
    consumed = run.consumed
    if source not in consumed.sources or prompt_id not in consumed.prompts:
        return []
    is_first = consumed["sample_index"] == 0
    is_first &= consumed["source"] == consumed.sources.index(source)
    is_first &= consumed["prompt_id"] == consumed.prompts.index(prompt_id)
    rows = np.flatnonzero(is_first)
    rows = rows[np.argsort(consumed["min_policy_version"][rows], kind="stable")]
    return [consumed.place(row) for row in rows]


def _groups(consumed: Columns) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns start and end of each group; its rows are adjacent, and sample_index counts from 0."""
    first = consumed["sample_index"] == 0
    starts = np.flatnonzero(first).astype(np.int64)
    return starts, np.append(starts[1:], len(first)).astype(np.int64) if len(starts) else starts


def _meeting(consumed: Consumed, query: Query) -> npt.NDArray[np.bool_] | None:
    """Returns which rows meet the conditions; None without conditions."""
    conditions: list[npt.NDArray[np.bool_]] = []
    if query.group is not None:
        conditions.append(consumed["group_id"] == query.group)
    if query.generator is not None:
        conditions.append(consumed["generator"] == query.generator)
    named = (("outcome", query.outcome, consumed.outcomes), ("source", query.source, consumed.sources))
    for name, chosen, names in named:
        if chosen and chosen not in names:
            raise InputError(repr(chosen), key=name, expected=f"one of {', '.join(names)}")
        if chosen:
            conditions.append(consumed[name] == names.index(chosen))
    ranges = {"policy_version": query.version, "staleness": query.staleness, "reward": query.reward}
    for name, (first, last) in ranges.items():
        if first is not None:
            conditions.append(consumed[name] >= first)
        if last is not None:
            conditions.append(consumed[name] <= last)
    return np.logical_and.reduce(conditions) if conditions else None


def mean_rewards(
    rewards: npt.NDArray[Any], starts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Returns each group's mean of the known rewards, NaN if none is known, and their number."""
    finite = np.isfinite(rewards)
    sums = np.add.reduceat(np.where(finite, rewards, 0.0), starts, dtype=np.float64)
    counts = np.add.reduceat(finite, starts, dtype=np.int64)
    return np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0), counts


def _whole(name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = _INT64.max + 1
    if not _INT64.min <= number <= _INT64.max:
        raise InputError(repr(text), key=name, expected="a whole number of at most 64 bits")
    return number


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(repr(text), key=name, expected="a number")
    return number


def _range(name: str, text: str, number: Callable[[str, str], Any] = _whole) -> tuple[Any, Any]:
    """Parses a range written as `3`, `3..9`, `3..` or `..9`."""
    first, dots, last = text.partition("..")
    low = number(name, first) if first.strip() else None
    high = (number(name, last) if last.strip() else None) if dots else low
    if low is None and high is None:
        raise InputError(repr(text), key=name, expected="a number or a range, such as 3, 3..9, 3.. or ..9")
    if low is not None and high is not None and low > high:
        raise InputError(repr(text), key=name, expected="a range whose first number does not exceed its last")
    return low, high


def _matching(pattern: str, expected: str, convert: Callable[[str], Any]) -> Callable[[str, str], Any]:
    def parse_text(name: str, text: str) -> Any:
        if re.fullmatch(pattern, text) is None:
            raise InputError(repr(text), key=name, expected=expected)
        return convert(text)

    return parse_text


def _one_of(*choices: str) -> Callable[[str, str], str]:
    return _matching("|".join(choices), f"one of {', '.join(choices)}", str)


_PARSERS: Mapping[str, Callable[[str, str], Any]] = {
    "group": _whole,
    "text": lambda name, text: text,
    "generator": _whole,
    "outcome": lambda name, text: text,
    "source": lambda name, text: text,
    "version": _range,
    "staleness": _range,
    "reward": lambda name, text: _range(name, text, _number),
    "order": _one_of(*get_args(Order)),
    "colour": _one_of(*get_args(Colouring)),
    "page": _matching(r"\d{1,18}", "a whole number of at least 0", int),
    "open": _matching(
        r"\d{1,9}\.\d{1,18}",
        "a generator and one of its rows, such as 0.128",
        lambda text: tuple(map(int, text.split("."))),
    ),
    "versions": _matching(_ALL, _ALL, bool),
}
"""Field of a query, and parameter of an address → its parser."""


def _typed(name: str, value: Any) -> str:
    if name == "versions":
        return _ALL
    if name == "open":
        return f"{value[0]}.{value[1]}"
    if isinstance(value, tuple):
        first, last = ("" if end is None else str(end) for end in value)
        return first if first == last else f"{first}..{last}"
    return str(value)
