"""Which groups a person asks for: from what they typed, or from a link, to places in `RunData.consumed`.

    ?group=12&staleness=2..&order=highest ──► parse ──► Query ──► find ──► groups, a page of them at a time
              ▲                                 │ huge or malformed                  ▲
              └──────────── address ◄───────────┴─► one sentence                     │
                                          text ──► with_text, over prompts of the newest groups found

A group is found if any of its trajectories fits all that is asked of one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args
from urllib.parse import parse_qsl, urlencode

import numpy as np
import numpy.typing as npt

from dashboard.data import Columns
from millrace.errors import InputError

PAGE_SIZE = 25
"""Groups shown at once."""
MAX_CHARACTERS = 200
"""Of one field."""
MAX_TEXT_GROUPS = 2000
"""Whose prompts are searched for a text: the newest that fit what else is asked."""

Order = Literal["newest", "highest", "lowest"]
_NOTHING = (None, None)
_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True, kw_only=True)
class Query:
    """What is asked of a group. A range holds its first and last number; None on a side that is open."""

    group: int | None = None
    text: str = ""
    """Part of the prompt's name or of its text, in any case of letters."""
    generator: int | None = None
    outcome: str = ""
    """trained, or a drop_reason."""
    version: tuple[int | None, int | None] = _NOTHING
    """Policy version that the step made which the group was taken for."""
    staleness: tuple[int | None, int | None] = _NOTHING
    """Policy versions."""
    reward: tuple[float | None, float | None] = _NOTHING
    order: Order = "newest"
    """Or the highest or lowest mean reward first; groups without any reward last."""
    page: int = 0
    """From 0; of PAGE_SIZE groups."""
    open: tuple[int, int] | None = None
    """The group to be read: its generator, and a row_id of it."""


FIELDS: tuple[str, ...] = tuple(field.name for field in fields(Query))
"""In an address these are the names of the query."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """Groups, in the order asked for: group i has the rows starts[i] to ends[i] − 1 of `RunData.consumed`."""

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def page(self, number: int) -> list[tuple[int, int]]:
        """The places of the groups on a page."""
        shown = slice(number * PAGE_SIZE, (number + 1) * PAGE_SIZE)
        return list(zip(self.starts[shown].tolist(), self.ends[shown].tolist(), strict=True))


def from_address(search: str) -> Query:
    """The query in an address, such as `?group=123`; names that are not ours are passed over. Raises InputError."""
    try:
        values = dict(parse_qsl(search.removeprefix("?"), max_num_fields=50))
    except ValueError as error:
        raise InputError(f"the address asks for too much: {error}, expected at most 50 fields") from error
    return parse({name: value for name, value in values.items() if name in FIELDS})


def parse(values: Mapping[str, str]) -> Query:
    """What was typed into each field of a query. Raises InputError, one sentence that names the field."""
    words = {name: value.strip() for name, value in values.items() if value.strip()}
    for name, word in words.items():
        if len(word) > MAX_CHARACTERS:
            raise InputError(f"{name} has {len(word):,} characters: expected at most {MAX_CHARACTERS}")
    order = words.get("order", "newest")
    if order not in get_args(Order):
        raise InputError(f"order is {order!r}: expected one of {', '.join(get_args(Order))}")
    return Query(
        group=_whole("group", words["group"]) if "group" in words else None,
        text=words.get("text", ""),
        generator=_whole("generator", words["generator"]) if "generator" in words else None,
        outcome=words.get("outcome", ""),
        version=_range("version", words.get("version", ""), _whole),
        staleness=_range("staleness", words.get("staleness", ""), _whole),
        reward=_range("reward", words.get("reward", ""), _number),
        order=order,  # type: ignore[arg-type]
        page=_page(words.get("page", "0")),
        open=_place(words["open"]) if "open" in words else None,
    )


def typed(query: Query) -> dict[str, str]:
    """What `parse` makes this query of: only the fields that ask for something."""
    ranges = {name: _typed_range(*getattr(query, name)) for name in ("version", "staleness", "reward")}
    words = {
        "group": "" if query.group is None else str(query.group),
        "text": query.text,
        "generator": "" if query.generator is None else str(query.generator),
        "outcome": query.outcome,
        **ranges,
        "order": "" if query.order == "newest" else query.order,
        "page": str(query.page) if query.page else "",
        "open": "" if query.open is None else f"{query.open[0]}.{query.open[1]}",
    }
    return {name: word for name, word in words.items() if word}


def address(query: Query) -> str:
    """The query as an address has it; `?` alone where nothing is asked."""
    return f"?{urlencode(typed(query))}"


def find(consumed: Columns, outcomes: Sequence[str], query: Query) -> Found:
    """All groups that fit the query, save for its text. Raises InputError for an outcome that nothing had."""
    starts, ends = _groups(consumed)
    if len(starts) == 0:
        return Found(starts=starts, ends=ends)
    fits = _fitting(consumed, outcomes, query)
    some = np.ones(len(starts), bool) if fits is None else np.logical_or.reduceat(fits, starts)
    if query.order == "newest":
        return Found(starts=starts[some][::-1], ends=ends[some][::-1])
    # Of those with the same reward the newest first, and those without one at the end.
    means = _mean_rewards(consumed["reward"], starts)[some][::-1]
    places = np.argsort(-means if query.order == "highest" else means, kind="stable")
    return Found(starts=starts[some][::-1][places], ends=ends[some][::-1][places])


def with_text(found: Found, text: str, prompts: Callable[[Sequence[int]], Mapping[int, str]]) -> Found:
    """Those of the newest MAX_TEXT_GROUPS groups found whose prompt holds `text`, in any case of letters.

    `prompts` is asked once for what there is to read of each group's prompt, by the place of its first row, newest
    first; it may leave some out.
    """
    newest = np.sort(found.starts)[::-1][:MAX_TEXT_GROUPS]
    wanted = text.casefold()
    holding = [start for start, prompt in prompts(newest.tolist()).items() if wanted in prompt.casefold()]
    kept = np.isin(found.starts, holding)
    return Found(starts=found.starts[kept], ends=found.ends[kept])


def _groups(consumed: Columns) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The rows of a group are next to each other, and count from 0."""
    first = consumed["sample_index"] == 0
    starts = np.flatnonzero(first).astype(np.int64)
    return starts, np.append(starts[1:], len(first)).astype(np.int64) if len(starts) else starts


def _fitting(consumed: Columns, outcomes: Sequence[str], query: Query) -> npt.NDArray[np.bool_] | None:
    """Which rows fit; None where nothing is asked of a row."""
    asked: list[npt.NDArray[np.bool_]] = []
    if query.group is not None:
        asked.append(consumed["group_id"] == query.group)
    if query.generator is not None:
        asked.append(consumed["generator"] == query.generator)
    if query.outcome:
        if query.outcome not in outcomes:
            raise InputError(f"outcome is {query.outcome!r}: expected one of {', '.join(outcomes)}")
        asked.append(consumed["outcome"] == outcomes.index(query.outcome))
    for name, (first, last) in (
        ("policy_version", query.version),
        ("staleness", query.staleness),
        ("reward", query.reward),
    ):
        if first is not None:
            asked.append(consumed[name] >= first)
        if last is not None:
            asked.append(consumed[name] <= last)
    return np.logical_and.reduce(asked) if asked else None


def _mean_rewards(rewards: npt.NDArray[Any], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Of each group, over the rewards that are known; NaN where none is."""
    known = np.isfinite(rewards)
    sums = np.add.reduceat(np.where(known, rewards, 0.0), starts, dtype=np.float64)
    counts = np.add.reduceat(known, starts, dtype=np.int64)
    means: npt.NDArray[np.float64] = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    return means


def _whole(name: str, word: str) -> int:
    try:
        number = int(word)
    except ValueError:
        number = _INT64.max + 1
    if not _INT64.min <= number <= _INT64.max:
        raise InputError(f"{name} is {word!r}: expected a whole number of at most 64 bits")
    return number


def _number(name: str, word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{name} is {word!r}: expected a number")
    return number


def _range(name: str, word: str, number: Callable[[str, str], Any]) -> tuple[Any, Any]:
    """What is written as `3`, `3..9`, `3..` or `..9`."""
    if not word:
        return _NOTHING
    first, dots, last = word.partition("..")
    low = number(name, first) if first.strip() else None
    high = (number(name, last) if last.strip() else None) if dots else low
    if low is None and high is None:
        raise InputError(f"{name} is {word!r}: expected a number or a range, such as 3, 3..9, 3.. or ..9")
    if low is not None and high is not None and low > high:
        raise InputError(f"{name} is {word!r}: expected a range whose first number is not above its last")
    return low, high


def _typed_range(first: float | None, last: float | None) -> str:
    if first == last:
        return "" if first is None else str(first)
    return f"{'' if first is None else first}..{'' if last is None else last}"


def _page(word: str) -> int:
    page = _whole("page", word)
    if page < 0:
        raise InputError(f"page is {word!r}: expected a whole number from 0 on")
    return page


def _place(word: str) -> tuple[int, int]:
    generator, _, row = word.partition(".")
    place = _whole("open", generator), _whole("open", row)
    if min(place) < 0:
        raise InputError(f"open is {word!r}: expected a generator and a row of it, such as 0.128")
    return place
