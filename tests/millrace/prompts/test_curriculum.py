"""Which prompts are asked next: by past rewards, the same for every generator, and never decided twice."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stores.dict_store import DictStore
from support.streams.scored_groups import consume

from configs.sources import SourceConfig
from configs.stored import DEFAULT_SOURCE
from configs.task import PromptsConfig
from millrace.errors import PromptsError
from millrace.prompts.blocks import PromptBlock, SourceBlock
from millrace.prompts.mixture import MixedSource, Mixture
from millrace.rollouts.lineage import Lineage
from millrace.types import Prompt
from storage import layout
from storage.errors import StreamCorrupt
from storage.streams.log import LogReader
from storage.streams.sealed import seal

BLOCK = 4
FIRST = Lineage(0, {})


def block_of(*positions: int) -> dict[str, object]:
    """A stored block of the only source."""
    source = SourceBlock(
        groups=list(range(len(positions))),
        positions=list(positions),
        num_prompts=4,
        num_easy=0,
        num_hard=0,
        weight=1.0,
        credit=0.0,
        num_dropped=0,
    )
    return dataclasses.asdict(PromptBlock(policy_version=0, sources={DEFAULT_SOURCE: source}))


SOLVED, UNSOLVED, SPREAD = [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]


@pytest.fixture
def dict_store() -> DictStore:
    return DictStore()


def open_curriculum(
    store: DictStore,
    *,
    num_prompts: int = 4,
    block_groups: int = BLOCK,
    shuffle: bool = False,
    lineage: Lineage = FIRST,
    last_group: int = -1,
    window: int = 1,
) -> Mixture:
    """A generator's, under weights of `lineage`; by default prompts keep their order and one group tells enough."""
    prompts = [Prompt(prompt_id=str(i), text=f"{i}", answer="", source="test") for i in range(num_prompts)]
    config = PromptsConfig(source="file.jsonl", shuffle=shuffle, curriculum_window=window)
    source = MixedSource(prompts=prompts, config=config, mixing=SourceConfig(), seed=7)
    curriculum = Mixture(store, {DEFAULT_SOURCE: source}, seed=7, block_groups=block_groups)
    curriculum.switch_lineage(lineage, last_group)
    return curriculum


def prompts_of(curriculum: Mixture, groups: range, version: int = 0) -> list[int]:
    """The prompts of these groups under weights of `version`."""
    result = []
    for n in groups:
        curriculum.decide(n, version)
        source, prompt = curriculum.prompt_at(n)
        assert source == DEFAULT_SOURCE
        result.append(int(prompt.prompt_id))
    return result


def easy_and_hard(curriculum: Mixture) -> tuple[int, int]:
    """How many prompts of the newest block are easy and hard."""
    assert curriculum.newest is not None
    source = curriculum.newest.sources[DEFAULT_SOURCE]
    return source.num_easy, source.num_hard


@given(
    num_prompts=st.integers(1, 12),
    block_groups=st.integers(1, 30),
    shuffle=st.booleans(),
    restarts=st.sets(st.integers(0, 5)),
)
def test_with_equal_weights_every_prompt_is_asked_once_before_any_is_asked_again(
    num_prompts: int, block_groups: int, shuffle: bool, restarts: set[int]
) -> None:
    store = DictStore()
    curriculum = open_curriculum(store, num_prompts=num_prompts, block_groups=block_groups, shuffle=shuffle)
    for epoch in range(6):
        if epoch in restarts:
            curriculum = open_curriculum(store, num_prompts=num_prompts, block_groups=block_groups, shuffle=shuffle)
        result = prompts_of(curriculum, range(epoch * num_prompts, (epoch + 1) * num_prompts))
        assert sorted(result) == list(range(num_prompts))


def test_shuffled_prompts_have_an_order_per_block_and_seed(
    dict_store: DictStore,
) -> None:
    result = prompts_of(open_curriculum(dict_store, num_prompts=50, block_groups=50, shuffle=True), range(100))
    assert result[:50] != result[50:]
    assert result == prompts_of(open_curriculum(DictStore(), num_prompts=50, block_groups=50, shuffle=True), range(100))


def test_prompts_that_were_all_right_or_all_wrong_are_asked_less_often(dict_store: DictStore) -> None:
    curriculum = open_curriculum(dict_store)
    assert prompts_of(curriculum, range(4)) == [0, 1, 2, 3]
    consume(dict_store, 1, {0: SPREAD, 1: SOLVED, 2: UNSOLVED, 3: SPREAD})
    result = prompts_of(curriculum, range(4, 8), 2)
    assert result == [0, 3, 0, 3], "1 and 2 are asked again in epoch 4"
    assert easy_and_hard(curriculum) == (1, 1)


def test_in_the_long_run_prompts_are_asked_in_proportion_to_their_weights(dict_store: DictStore) -> None:
    curriculum = open_curriculum(dict_store)
    prompts_of(curriculum, range(4))
    consume(dict_store, 1, {0: SPREAD, 1: SOLVED, 2: UNSOLVED, 3: SPREAD})
    counts = Counter(prompts_of(curriculum, range(4, 524), 2))
    assert counts == {0: 208, 3: 208, 1: 52, 2: 52}


def test_a_prompt_that_was_hard_is_asked_as_often_as_others_once_it_has_spread(dict_store: DictStore) -> None:
    curriculum = open_curriculum(dict_store, num_prompts=2, block_groups=2)
    prompts_of(curriculum, range(2))
    consume(dict_store, 1, {0: SPREAD, 1: UNSOLVED})
    assert prompts_of(curriculum, range(2, 8), 2) == [0, 0, 0, 0, 1, 0]
    consume(dict_store, 2, {6: SPREAD})
    counts = Counter(prompts_of(curriculum, range(8, 28), 3))
    assert counts == {0: 10, 1: 10}


def newest_shares(store: DictStore, *steps: dict[int, list[float | None]], window: int = 1) -> tuple[int, int]:
    """How many of two prompts are easy and hard after these steps, two groups each, in the order 0, 1."""
    curriculum = open_curriculum(store, num_prompts=2, block_groups=2, window=window)
    for version, step in enumerate(steps):
        prompts_of(curriculum, range(2 * version, 2 * version + 2), version)
        consume(store, version + 1, step)
    prompts_of(curriculum, range(2 * len(steps), 2 * len(steps) + 2), len(steps) + 1)
    return easy_and_hard(curriculum)


@pytest.mark.parametrize(
    ("steps", "window", "expected"),
    [
        ([{0: SOLVED, 1: UNSOLVED}], 1, (1, 1)),
        ([{0: SOLVED, 1: UNSOLVED}], 2, (0, 0)),
        ([{0: SOLVED, 1: UNSOLVED}, {2: SOLVED, 3: UNSOLVED}], 2, (1, 1)),
        ([{0: SOLVED, 1: UNSOLVED}, {2: SPREAD, 3: SOLVED}], 2, (0, 0)),
        ([{0: SPREAD, 1: SPREAD}, {2: SOLVED, 3: UNSOLVED}], 1, (1, 1)),
        ([{0: SOLVED, 1: SOLVED}, {2: SPREAD, 3: SPREAD}], 1, (0, 0)),
        ([{0: [0.5, 0.5], 1: [0.5, 0.6]}], 1, (0, 1)),
        ([{0: [1.5, 1.5], 1: [1.5, 1.0]}], 1, (1, 0)),
        ([{0: [1.0, None], 1: [None, 0.0]}], 1, (1, 1)),
    ],
)
def test_easy_and_hard_are_those_whose_last_groups_were_alike(
    dict_store: DictStore,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[dict[int, list[float | None]]],
    window: int,
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr("millrace.prompts.mixture._GAP", 1)
    assert newest_shares(dict_store, *steps, window=window) == expected


def test_dropped_groups_count_unless_rolled_back_or_without_rewards(dict_store: DictStore) -> None:
    curriculum = open_curriculum(dict_store, num_prompts=5, block_groups=5)
    prompts_of(curriculum, range(5))
    consume(dict_store, 1, {0: SPREAD}, dropped={1: SOLVED, 4: [None, None]})
    consume(dict_store, 2, {2: SPREAD}, dropped={3: UNSOLVED}, reason="rolled_back")
    prompts_of(curriculum, range(5, 6), 3)
    assert easy_and_hard(curriculum) == (1, 0)


def test_only_steps_before_the_version_of_the_weights_count(dict_store: DictStore) -> None:
    curriculum = open_curriculum(dict_store)
    prompts_of(curriculum, range(4))
    consume(dict_store, 1, {0: SOLVED})
    consume(dict_store, 2, {1: SOLVED})
    prompts_of(curriculum, range(4, 8), 2)
    assert easy_and_hard(curriculum)[0] == 1, "when step 2 becomes visible depends on time"


def test_a_block_stays_as_the_first_generator_decided_it(dict_store: DictStore) -> None:
    first, second = open_curriculum(dict_store), open_curriculum(dict_store)
    prompts_of(first, range(4))
    consume(dict_store, 1, {0: SPREAD, 1: SOLVED, 2: UNSOLVED, 3: SPREAD})
    decided = prompts_of(first, range(4, 8), 0)
    assert decided == [0, 1, 2, 3], "under version 0 nothing is known"
    assert prompts_of(second, range(8), 2) == [0, 1, 2, 3, *decided]
    assert prompts_of(open_curriculum(dict_store), range(8), 2) == [0, 1, 2, 3, *decided], "after a restart"
    assert prompts_of(first, range(8, 12), 2) == prompts_of(second, range(8, 12), 0)


class Overtaken(DictStore):
    """Another generator decides a block just before this one does."""

    def put_if_absent(self, path: str, data: bytes | bytearray | memoryview) -> bool:
        if path.startswith(layout.PROMPT_BLOCKS) and path not in self.objects:
            first = 2 * BLOCK * int(path[-13:-5])
            self.objects[path] = seal(block_of(*range(first + 1, first + 2 * BLOCK, 2)))
        return super().put_if_absent(path, data)


def test_of_two_generators_that_decide_at_once_both_follow_the_first() -> None:
    store = Overtaken()
    result = prompts_of(open_curriculum(store), range(8))
    assert result == [1, 3] * 4, "not its own order"
    assert prompts_of(open_curriculum(store), range(8)) == result


def test_what_a_rolled_back_trainer_consumed_does_not_count_and_its_blocks_stay(dict_store: DictStore) -> None:
    curriculum = open_curriculum(dict_store)
    prompts_of(curriculum, range(4))
    consume(dict_store, 1, {0: SOLVED})
    consume(dict_store, 2, {1: SOLVED})
    decided = prompts_of(curriculum, range(4, 8), 3)
    # The trainer starts again from version 1.
    consume(dict_store, 2, {1: UNSOLVED}, incarnation=1)
    curriculum.switch_lineage(Lineage(1, {0: 1}), 7)
    assert prompts_of(curriculum, range(4, 8), 1) == decided
    prompts_of(curriculum, range(8, 12), 3)
    assert easy_and_hard(curriculum) == (1, 1)


@pytest.mark.parametrize(
    "damaged", [b"", b'{"crc":', b'{"positions": [1]}', seal({"positions": [1]}), seal(block_of(4, 4, 5, 6))]
)
def test_a_damaged_block_is_named(dict_store: DictStore, damaged: bytes) -> None:
    prompts_of(open_curriculum(dict_store), range(8))
    path = layout.prompt_block(1)
    dict_store.objects[path] = damaged
    with pytest.raises(StreamCorrupt) as raised:
        open_curriculum(dict_store)
    assert raised.value.file == path


def test_a_missing_block_is_never_decided_again(dict_store: DictStore) -> None:
    curriculum = open_curriculum(dict_store)
    prompts_of(curriculum, range(8))
    del dict_store.objects[layout.prompt_block(1)]
    assert prompts_of(open_curriculum(dict_store), range(4)) == [0, 1, 2, 3]
    with pytest.raises(
        StreamCorrupt, match=r"^prompt_blocks/00000001\.json: it is missing, though group 5 was admitted"
    ):
        open_curriculum(dict_store, last_group=5)
    consume(dict_store, 1, {6: SPREAD})
    with pytest.raises(
        StreamCorrupt, match=r"^prompt_blocks/00000001\.json: it is missing, though group 6 was admitted"
    ):
        open_curriculum(dict_store)


def test_a_block_whose_predecessors_are_missing_is_not_decided(dict_store: DictStore) -> None:
    with pytest.raises(StreamCorrupt, match=r"^prompt_blocks/00000000\.json: it is missing, though group 4"):
        open_curriculum(dict_store).decide(4, 0)


def test_another_number_of_prompts_is_refused(dict_store: DictStore) -> None:
    prompts_of(open_curriculum(dict_store), range(4))
    with pytest.raises(PromptsError) as caught:
        open_curriculum(dict_store, num_prompts=5)
    assert caught.value.file == "file.jsonl"


def test_rewards_in_a_damaged_part_are_not_known_and_nothing_else_is_lost(dict_store: DictStore) -> None:
    curriculum = open_curriculum(dict_store)
    prompts_of(curriculum, range(4))
    consume(dict_store, 1, {0: SOLVED})
    consume(dict_store, 2, {1: SOLVED})
    records = [record for record in iter(LogReader(dict_store, layout.CONSUMED).next, None) if record.kind == "data"]
    dict_store.objects[f"{layout.CONSUMED}/{records[0].file}"] = b""
    prompts_of(curriculum, range(4, 8), 3)
    assert easy_and_hard(curriculum)[0] == 1
