"""A query finds exactly the groups that a slow loop finds, and a huge or malformed one is refused in a sentence."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dashboard.read.model import Consumed
from dashboard.read.search import (
    PAGE_SIZE,
    Query,
    SearchResult,
    address,
    find,
    from_address,
    parse,
    typed,
)
from millrace.errors import InputError

OUTCOMES = ("trained", "error", "stale")
SOURCES = ("math", "words")
SEED = 61


def taken(num_groups: int, group_size: int = 4, seed: int = SEED) -> Consumed:
    """Groups of two generators, taken for a new version every five groups; some stale, some members without reward."""
    random = np.random.default_rng(seed)
    group = np.repeat(np.arange(num_groups), group_size)
    rows = len(group)
    outcome = np.where(random.random(num_groups) < 0.2, 2, 0)[group]
    outcome = np.where((outcome == 0) & (random.random(rows) < 0.1), 1, outcome).astype(np.int8)
    reward = np.where(outcome == 1, np.nan, random.integers(0, 2, rows)).astype(np.float32)
    columns = {
        "group_id": group.astype(np.int64),
        "generator": (group % 2).astype(np.int32),
        "sample_index": np.tile(np.arange(group_size, dtype=np.int32), num_groups),
        "policy_version": (group // 5 + 1).astype(np.int64),
        "staleness": random.integers(0, 4, num_groups).astype(np.int32)[group],
        "outcome": outcome,
        "source": (group % 3 == 0).astype(np.int8),
        "reward": reward,
    }
    return Consumed(columns, outcomes=OUTCOMES, sources=SOURCES, prompts=())


def groups_of(result: SearchResult, columns: Mapping[str, npt.NDArray[Any]]) -> list[int]:
    return [int(columns["group_id"][start]) for start in result.starts]


def inside(value: float, limits: tuple[float | None, float | None]) -> bool:
    first, last = limits
    return (first is None or value >= first) and (last is None or value <= last)


def found_slowly(columns: Mapping[str, npt.NDArray[Any]], query: Query) -> list[int]:
    result: dict[int, list[float]] = {}
    rewards: dict[int, list[float]] = {}
    for row in range(len(columns["group_id"])):
        values = {name: column[row] for name, column in columns.items()}
        group = int(values["group_id"])
        rewards.setdefault(group, [])
        if not np.isnan(values["reward"]):
            rewards[group].append(float(values["reward"]))
        if (
            (query.group is None or group == query.group)
            and (query.generator is None or values["generator"] == query.generator)
            and (not query.outcome or OUTCOMES[values["outcome"]] == query.outcome)
            and (not query.source or SOURCES[values["source"]] == query.source)
            and inside(values["policy_version"], query.version)
            and inside(values["staleness"], query.staleness)
            and inside(values["reward"], query.reward)
        ):
            result.setdefault(group, [])
    newest = sorted(result, reverse=True)
    if query.order == "newest":
        return newest
    sign = -1 if query.order == "highest" else 1

    def place(group: int) -> float:
        finite = rewards[group]
        return sign * sum(finite) / len(finite) if finite else float("inf")

    return sorted(newest, key=place)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"group": "7"},
        {"outcome": "error", "generator": "0"},
        {"version": "3..5", "staleness": "2.."},
        {"source": "words", "outcome": "stale"},
        {"staleness": "..0"},
        {"reward": "0.5..1"},
        {"reward": "..0.5", "order": "lowest"},
        {"order": "highest", "outcome": "error", "version": "2.."},
    ],
)
def test_a_query_finds_what_a_loop_over_all_rows_finds_in_the_same_order(fields: dict[str, str]) -> None:
    columns = taken(60)
    query = parse(fields)
    result = find(columns, query)
    expected = found_slowly(columns, query)
    assert groups_of(result, columns) == expected, f"seed {SEED}"
    assert (result.ends - result.starts).tolist() == [4] * len(expected)
    assert expected, "each of these queries has a result"


def test_groups_come_a_page_at_a_time() -> None:
    result = find(taken(60), Query())
    pages = [result.page(number) for number in range(4)]
    assert [len(page) for page in pages] == [PAGE_SIZE, PAGE_SIZE, 10, 0]
    assert [place for page in pages for place in page] == list(
        zip(result.starts.tolist(), result.ends.tolist(), strict=True)
    )


def test_groups_chosen_by_their_text_keep_the_order() -> None:
    columns = taken(60)
    result = find(columns, parse({"order": "highest"}))
    chosen = result.of([8, 80, 16])
    assert sorted(chosen.starts.tolist()) == [8, 16, 80]
    assert groups_of(chosen, columns) == [group for group in groups_of(result, columns) if group in (2, 4, 20)]


@pytest.mark.parametrize(
    "values",
    [
        {"text": "x" * 201},
        {"group": "9" * 10_000},
        {"group": "twelve"},
        {"group": str(2**63)},
        {"generator": "1.5"},
        {"version": "9..3"},
        {"version": "3...9"},
        {"staleness": ".."},
        {"reward": "nan.."},
        {"reward": "..inf"},
        {"order": "random"},
        {"page": "-1"},
        {"open": "0"},
        {"open": "0.-4"},
    ],
)
def test_a_huge_or_malformed_query_is_refused_in_one_short_sentence(values: dict[str, str]) -> None:
    with pytest.raises(InputError) as refused:
        parse(values)
    assert next(iter(values)) in str(refused.value)
    assert len(str(refused.value)) < 200


def test_an_unknown_outcome_or_source_and_an_address_with_too_many_fields_are_refused() -> None:
    with pytest.raises(InputError):
        find(taken(3), parse({"outcome": "lost"}))
    with pytest.raises(InputError):
        find(taken(3), parse({"source": "code"}))
    with pytest.raises(InputError):
        from_address("?" + "&".join(f"a{i}=1" for i in range(100)))
    with pytest.raises(InputError):
        from_address("?versions=some")


@pytest.mark.parametrize(
    ("search", "query"),
    [
        ("?group=123", Query(group=123)),
        ("?version=7", Query(version=(7, 7))),
        ("?version=..7&open=1.40&token=secret", Query(version=(None, 7), open=(1, 40))),
        (
            "?text=1%2B1%3D&reward=-0.5..&order=lowest&page=3",
            Query(text="1+1=", reward=(-0.5, None), order="lowest", page=3),
        ),
        ("?generator=0&outcome=stale&staleness=1..2", Query(generator=0, outcome="stale", staleness=(1, 2))),
        ("", Query()),
    ],
)
def test_an_address_holds_the_whole_query_so_that_a_link_finds_the_same(search: str, query: Query) -> None:
    assert from_address(search) == query
    assert from_address(address(query)) == query
    assert parse(typed(query)) == query
    assert "secret" not in address(query)
