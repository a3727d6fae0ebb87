"""The groups of one prompt are found in all generators' streams, a bounded number of parts at a time."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from support.stored_run.run import Shape, StoredRun
from support.stores.dict_store import DictStore
from support.streams.rows import part_files, read_rows

from configs.stored import DEFAULT_SOURCE
from dashboard.read import same_prompt
from dashboard.read.groups import GroupReader
from dashboard.read.model import RunData
from dashboard.read.same_prompt import SamePrompt
from storage import layout
from storage.schema import TRAJECTORY

Look = Callable[[], RunData]
SHAPE = Shape(steps=10, groups_per_step=4, generators=2, prompts=12, stale_share=0.0)
PROMPT = "5+0="


@pytest.fixture
def reader(dict_store: DictStore, watch: Callable[..., Look]) -> GroupReader:
    """The reader of a run of forty groups with twelve prompts, in twenty parts."""
    run = StoredRun(dict_store, "small", SHAPE)
    run.append(10)
    return GroupReader(dict_store, watch(dict_store)().info.config)


def expected(store: DictStore) -> set[tuple[int, int]]:
    """Generator and first row of each group that answers the prompt."""
    return {
        (generator, row["row_id"])
        for generator in range(SHAPE.generators)
        for row in read_rows(store, layout.trajectories(generator), TRAJECTORY)
        if row["prompt_id"] == PROMPT and row["sample_index"] == 0
    }


def places(result: SamePrompt) -> set[tuple[int, int]]:
    return {(group.generator, group.row_id) for group in result.groups}


def test_the_groups_of_a_prompt_are_found_in_the_order_of_their_versions(
    reader: GroupReader, dict_store: DictStore
) -> None:
    result = reader.same_prompt(DEFAULT_SOURCE, PROMPT)
    assert places(result) == expected(dict_store)
    assert len(result.groups) == 4 - 1
    assert all(group.policy_version <= other.policy_version for group, other in pairwise(result.groups))
    assert (result.searched, result.parts) == (20, 20)
    assert reader.same_prompt(DEFAULT_SOURCE, "no such prompt").groups == ()


def test_a_search_reads_the_newest_parts_first_and_the_next_one_continues(
    reader: GroupReader, dict_store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_prompt, "MAX_PARTS", 6)
    searched, output = [], set[tuple[int, int]]()
    for _ in range(4):
        result = reader.same_prompt(DEFAULT_SOURCE, PROMPT)
        searched.append(result.searched)
        assert places(result) >= output
        output = places(result)
    assert searched == [6, 12, 18, 20]
    assert output == expected(dict_store)


def test_a_search_reads_a_bounded_number_of_bytes(reader: GroupReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_prompt, "MAX_BYTES", 1)
    assert [reader.same_prompt(DEFAULT_SOURCE, PROMPT).searched for _ in range(3)] == [1, 2, 3]


def test_a_part_that_cannot_be_read_is_passed_over(reader: GroupReader, dict_store: DictStore) -> None:
    intact = expected(dict_store)
    dict_store.objects[part_files(dict_store, layout.trajectories(0))[0]] = b"damaged"
    result = reader.same_prompt(DEFAULT_SOURCE, PROMPT)
    assert (result.searched, result.parts) == (20, 20)
    assert places(result) <= intact


def test_prompts_of_two_sources_with_one_name_are_two_prompts(
    dict_store: DictStore, watch: Callable[..., Look]
) -> None:
    StoredRun(dict_store, "mixture", replace(SHAPE, prompts=10, sources=("math", "words"))).append(10)
    reader = GroupReader(dict_store, watch(dict_store)().info.config)
    by_source = {source: places(reader.same_prompt(source, PROMPT)) for source in ("math", "words")}
    assert by_source["math"] | by_source["words"] == expected(dict_store)
    assert all(by_source.values())
    assert not by_source["math"] & by_source["words"]
