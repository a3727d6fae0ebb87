"""Which source each group is of: exactly by the weights, the same for every generator, and never decided twice."""

import dataclasses
import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores.dict_store import DictStore
from support.streams.scored_groups import consume, write_step

from configs.sources import SourceConfig
from configs.task import PromptsConfig
from millrace.errors import PromptsError
from millrace.prompts.blocks import PromptBlock, read_block
from millrace.prompts.mixture import MixedSource, Mixture
from millrace.rollouts.consumed import ConsumedWriter
from millrace.rollouts.lineage import Lineage
from millrace.types import Prompt
from storage import layout
from storage.errors import StreamCorrupt
from storage.streams.sealed import seal

BLOCK = 80
GROUPS = 10_000
SOLVED, SPREAD = [1.0, 1.0], [0.0, 1.0]
NAMES = "abcdefg"


@pytest.fixture
def dict_store() -> DictStore:
    return DictStore()


def open_mixture(
    store: DictStore,
    sources: Mapping[str, SourceConfig],
    *,
    num_prompts: int = 30,
    last_group: int = -1,
    lineage: Lineage | None = None,
) -> Mixture:
    """A generator's, which was restarted."""
    mixed = {
        name: MixedSource(
            prompts=[Prompt(prompt_id=f"{name}{i}", text="", answer="", source="test") for i in range(num_prompts)],
            config=PromptsConfig(source=f"{name}.jsonl"),
            mixing=source,
            seed=7,
        )
        for name, source in sources.items()
    }
    mixture = Mixture(store, mixed, seed=7, block_groups=BLOCK)
    mixture.switch_lineage(lineage or Lineage(0, {}), last_group)
    return mixture


def weighted(**weights: float) -> dict[str, SourceConfig]:
    return {name: SourceConfig(weight=weight) for name, weight in weights.items()}


def prompts_of(mixture: Mixture, groups: range, version: int = 0) -> list[tuple[str, str]]:
    """Source and prompt of these groups under weights of `version`."""
    result = []
    for n in groups:
        mixture.decide(n, version)
        source, prompt = mixture.prompt_at(n)
        result.append((source, prompt.prompt_id))
    return result


def counted(mixture: Mixture, groups: range, version: int = 0) -> Counter[str]:
    """Groups of each source."""
    return Counter(source for source, _ in prompts_of(mixture, groups, version))


@settings(max_examples=5, deadline=None)
@given(
    weights=st.lists(st.floats(0.05, 5.0), min_size=2, max_size=7),
    num_generators=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_shares_are_the_weights_and_no_restart_changes_the_order(
    weights: list[float], num_generators: int, seed: int
) -> None:
    sources = weighted(**dict(zip(NAMES, weights, strict=False)))
    undisturbed = prompts_of(open_mixture(DictStore(), sources), range(GROUPS))
    store, chance = DictStore(), random.Random(seed)
    generators = [open_mixture(store, sources) for _ in range(num_generators)]
    for n in range(GROUPS):
        number = n % num_generators
        if chance.random() < 0.002:
            generators[number] = open_mixture(store, sources, last_group=n - 1)
        assert prompts_of(generators[number], range(n, n + 1)) == undisturbed[n : n + 1]
    num_of_source = Counter(source for source, _ in undisturbed)
    for name, source in sources.items():
        assert abs(num_of_source[name] - GROUPS * source.weight / sum(weights)) < 3
        of_source = [prompt for each, prompt in undisturbed if each == name]
        for first in range(0, len(of_source) - 29, 30):
            assert len({*of_source[first : first + 30]}) == 30, "each prompt once per epoch of its source"


def trained_groups(
    store: DictStore,
    sources: Mapping[str, SourceConfig],
    *,
    num_groups: int = 10_000,
    is_dropped: Callable[[str], bool] = lambda source: False,
    seconds: Callable[[str], float] = lambda source: 1.0,
    restart: float = 0.01,
) -> Counter[str]:
    """Trains groups in steps of half a block, under a staleness bound of 1; groups of a source take `seconds`.

    Generators and trainer work in virtual time. `restart` is the chance that a step is followed by a restart.
    """
    per_step, chance = BLOCK // 2, random.Random(0)
    mixture, arrivals, trained = open_mixture(store, sources), list[tuple[float, int, str]](), Counter[str]()
    writer = ConsumedWriter(store, 0)
    admitted = num_dropped = 0
    now = 0.0
    for version in count():
        if chance.random() < restart:
            mixture = open_mixture(store, sources, last_group=admitted - 1)
        if trained.total() >= num_groups:
            writer.close()
            return trained
        of_step: dict[int, list[float]] = {}
        dropped: dict[int, list[float]] = {}
        while len(of_step) < per_step:
            while admitted < num_dropped + (version + 2) * per_step:
                mixture.decide(admitted, version)
                source, _ = mixture.prompt_at(admitted)
                heapq.heappush(arrivals, (now + seconds(source), admitted, source))
                admitted += 1
            now, group, source = heapq.heappop(arrivals)
            if is_dropped(source):
                dropped[group] = SOLVED
                num_dropped += 1
            else:
                of_step[group] = SPREAD
                trained[source] += 1
        write_step(writer, version + 1, of_step, dropped)
        writer.flush()
    raise AssertionError


def assert_shares(counts: Counter[str], sources: Mapping[str, SourceConfig]) -> None:
    total = sum(source.weight for source in sources.values())
    for name, source in sources.items():
        assert counts[name] / counts.total() == pytest.approx(source.weight / total, abs=0.01)


def test_shares_hold_for_trained_groups_of_a_source_ten_times_slower(dict_store: DictStore) -> None:
    sources, chance = weighted(a=1, b=2, c=0.5), random.Random(1)
    seconds = {"a": 10.0, "b": 1.0, "c": 1.0}
    counts = trained_groups(dict_store, sources, seconds=lambda source: seconds[source] * chance.expovariate(1))
    assert_shares(counts, sources)


def test_shares_hold_for_trained_groups_of_a_source_that_is_dropped_more_often(dict_store: DictStore) -> None:
    sources, chance = weighted(a=1, b=2, c=0.5), random.Random(2)
    dropped = {"a": 0.7, "b": 0.1, "c": 0.4}
    counts = trained_groups(dict_store, sources, is_dropped=lambda source: chance.random() < dropped[source])
    assert_shares(counts, sources)


def test_a_source_whose_groups_are_all_dropped_does_not_take_all_groups(dict_store: DictStore) -> None:
    sources = weighted(a=1, b=4, c=5)
    counts = trained_groups(dict_store, sources, num_groups=2000, is_dropped=lambda source: source == "a")
    assert counts["a"] == 0
    assert counts["b"] / counts.total() == pytest.approx(4 / 9, abs=0.01)
    last = read_block(dict_store, 20)
    assert last is not None
    assert len(last.sources["a"].groups) <= 0.4 * BLOCK + 1, "four times its share"


def test_new_weights_count_from_the_next_block(dict_store: DictStore) -> None:
    old = open_mixture(dict_store, weighted(a=1, b=1))
    before = prompts_of(old, range(10 * BLOCK))
    resumed = open_mixture(dict_store, weighted(a=1, b=4), last_group=10 * BLOCK - 1)
    assert prompts_of(resumed, range(10 * BLOCK)) == before
    groups = counted(resumed, range(10 * BLOCK, 20 * BLOCK))
    assert groups == {"a": pytest.approx(2 * BLOCK, abs=2), "b": pytest.approx(8 * BLOCK, abs=2)}


def test_an_added_source_has_its_share_from_the_next_block(dict_store: DictStore) -> None:
    before = prompts_of(open_mixture(dict_store, weighted(a=1, b=1)), range(10 * BLOCK))
    sources = weighted(a=1, b=1, c=2)
    resumed = open_mixture(dict_store, sources, last_group=10 * BLOCK - 1)
    assert prompts_of(resumed, range(10 * BLOCK)) == before
    after = prompts_of(resumed, range(10 * BLOCK, 20 * BLOCK))
    assert prompts_of(open_mixture(dict_store, sources), range(20 * BLOCK)) == before + after
    groups = Counter(source for source, _ in after)
    assert [groups[name] / BLOCK for name in "abc"] == pytest.approx([2.5, 2.5, 5], abs=0.05)


def test_a_weight_moves_to_its_final_weight_in_equal_steps(dict_store: DictStore) -> None:
    sources = {"a": SourceConfig(weight=1, final_weight=3, weight_steps=10), "b": SourceConfig(weight=1)}
    mixture, weights = open_mixture(dict_store, sources), []
    for number, version in enumerate((0, 5, 10, 100)):
        groups = counted(mixture, range(number * BLOCK, (number + 1) * BLOCK), version)
        assert mixture.newest is not None
        weight = mixture.newest.sources["a"].weight
        assert groups["a"] / BLOCK == pytest.approx(weight / (weight + 1), abs=0.02)
        weights.append(weight)
    assert weights == [1, 2, 3, 3]


def test_a_solved_source_gives_way_while_it_is_solved(dict_store: DictStore) -> None:
    sources = {"a": SourceConfig(solved_at=0.75), "b": SourceConfig()}
    mixture = open_mixture(dict_store, sources)
    order = prompts_of(mixture, range(BLOCK))
    of_source = {name: [n for n, (source, _) in enumerate(order) if source == name] for name in sources}

    def weight_after(version: int, rewards: dict[int, list[float]], number: int) -> float:
        consume(dict_store, version, rewards)
        prompts_of(mixture, range(number * BLOCK, (number + 1) * BLOCK), version + 1)
        assert mixture.newest is not None
        assert mixture.newest.sources["b"].weight == 1
        return mixture.newest.sources["a"].weight

    a = of_source["a"]
    assert weight_after(1, {a[0]: SOLVED, a[1]: SPREAD, of_source["b"][0]: [0.0, 0.0]}, 1) == 0.25
    assert weight_after(2, {a[2]: SPREAD}, 2) == 1, "4 of 6"
    assert weight_after(3, dict.fromkeys(a[3:6], SOLVED), 3) == 0.25
    assert weight_after(20, {of_source["b"][1]: SPREAD}, 4) == 1, "its last responses were trained long ago"


def test_groups_of_rolled_back_steps_are_not_made_up_for(dict_store: DictStore) -> None:
    mixture = open_mixture(dict_store, weighted(a=1, b=1))
    order = prompts_of(mixture, range(BLOCK))
    of_a = [n for n, (source, _) in enumerate(order) if source == "a"]
    consume(dict_store, 1, {of_a[20]: SPREAD}, dropped=dict.fromkeys(of_a[:20], SOLVED))
    again = open_mixture(DictStore(dict(dict_store.objects)), weighted(a=1, b=1))
    assert counted(again, range(BLOCK, 2 * BLOCK), 2) == {"a": 50, "b": 30}
    mixture.switch_lineage(Lineage(1, {0: 0}), BLOCK - 1)
    assert counted(mixture, range(BLOCK, 2 * BLOCK), 2) == {"a": 40, "b": 40}


def damaged_blocks() -> dict[str, Callable[[PromptBlock], object]]:
    def changed(block: PromptBlock, name: str, **changes: object) -> PromptBlock:
        source = dataclasses.replace(block.sources[name], **changes)
        return dataclasses.replace(block, sources={**block.sources, name: source})

    def without_last(block: PromptBlock) -> PromptBlock:
        a = block.sources["a"]
        return changed(block, "a", groups=a.groups[:-1], positions=a.positions[:-1])

    return {
        "a group has no source": without_last,
        "a group has two sources": lambda block: changed(block, "a", groups=block.sources["b"].groups),
        "a group has no position": lambda block: changed(block, "a", positions=block.sources["a"].positions[:-1]),
        "groups do not ascend": lambda block: changed(block, "a", groups=block.sources["a"].groups[::-1]),
        "of another source": lambda block: dataclasses.replace(block, sources={"z": block.sources["a"]}),
        "no source": lambda block: dataclasses.replace(block, sources={}),
    }


@pytest.mark.parametrize("damage", damaged_blocks())
def test_a_damaged_block_is_named(dict_store: DictStore, damage: str) -> None:
    prompts_of(open_mixture(dict_store, weighted(a=1, b=1)), range(2 * BLOCK))
    block = read_block(dict_store, 1)
    assert block is not None
    path = layout.prompt_block(1)
    dict_store.objects[path] = seal(dataclasses.asdict(damaged_blocks()[damage](block)))
    with pytest.raises(StreamCorrupt) as caught:
        open_mixture(dict_store, weighted(a=1, b=1))
    assert caught.value.file == path


def test_a_source_with_another_number_of_prompts_is_named(dict_store: DictStore) -> None:
    prompts_of(open_mixture(dict_store, weighted(a=1, b=1)), range(BLOCK))
    with pytest.raises(PromptsError) as caught:
        open_mixture(dict_store, weighted(a=1, b=1), num_prompts=31)
    assert caught.value.file == "source a: a.jsonl"
