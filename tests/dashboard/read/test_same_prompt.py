"""The groups of one prompt are found among those that the trainer took."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from support.stored_run.run import Shape, StoredRun
from support.stores.dict_store import DictStore
from support.streams.rows import part_files, read_rows

from configs.stored import DEFAULT_SOURCE
from dashboard.read.model import RunData
from dashboard.read.search import groups_of_prompt
from storage import layout
from storage.schema import TRAJECTORY

Look = Callable[[], RunData]
SHAPE = Shape(steps=10, groups_per_step=4, generators=2, prompts=12, stale_share=0.2)
PROMPT = "5+0="


def expected(store: DictStore) -> dict[tuple[int, int], int]:
    """Generator and first row of each group that answers the prompt → its oldest policy version."""
    return {
        (generator, row["row_id"]): row["min_policy_version"]
        for generator in range(SHAPE.generators)
        for row in read_rows(store, layout.trajectories(generator), TRAJECTORY)
        if row["prompt_id"] == PROMPT and row["sample_index"] == 0
    }


def test_the_groups_of_a_prompt_are_found_in_the_order_of_their_versions(
    dict_store: DictStore, watch: Callable[..., Look]
) -> None:
    StoredRun(dict_store, "small", SHAPE).append(10)
    run = watch(dict_store)()
    groups, versions = groups_of_prompt(run, DEFAULT_SOURCE, PROMPT), expected(dict_store)
    assert len(groups) == len(versions) > 2
    assert set(groups) == versions.keys()
    assert all(versions[group] <= versions[later] for group, later in pairwise(groups))
    assert groups_of_prompt(run, DEFAULT_SOURCE, "no such prompt") == []
    assert groups_of_prompt(run, "no such source", PROMPT) == []


def test_damaged_trajectories_do_not_hide_a_group_that_was_taken(
    dict_store: DictStore, watch: Callable[..., Look]
) -> None:
    StoredRun(dict_store, "small", SHAPE).append(10)
    intact = groups_of_prompt(watch(dict_store)(), DEFAULT_SOURCE, PROMPT)
    dict_store.objects[part_files(dict_store, layout.trajectories(0))[0]] = b"damaged"
    assert groups_of_prompt(watch(dict_store)(), DEFAULT_SOURCE, PROMPT) == intact


def test_prompts_of_two_sources_with_one_name_are_two_prompts(
    dict_store: DictStore, watch: Callable[..., Look]
) -> None:
    StoredRun(dict_store, "mixture", replace(SHAPE, prompts=10, sources=("math", "words"))).append(10)
    run = watch(dict_store)()
    math, words = (set(groups_of_prompt(run, source, PROMPT)) for source in ("math", "words"))
    assert math | words == expected(dict_store).keys()
    assert math and words
    assert not math & words
