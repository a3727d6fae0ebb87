"""Generators with a curriculum share one order of prompts, through rollbacks and restarts."""

from collections.abc import Callable

import pytest
from support.stages.workshop import CONFIG, Workshop, weights
from support.streams.scored_groups import consume
from transformers import PreTrainedTokenizerFast

from configs.task import PromptsConfig
from millrace.runs.record import create_run
from millrace.runs.status import StatusReader
from storage import layout
from storage.errors import StreamCorrupt
from storage.schema import METRIC
from storage.stores.memory import MemoryStore
from storage.streams.stream import StreamReader

PROMPTS = PromptsConfig(shuffle=False, curriculum_window=1)
ONE = CONFIG.model_copy(
    update={"prompts": PROMPTS, "staleness": CONFIG.staleness.model_copy(update={"max_staleness": 0})}
)
"""Blocks of four groups; nine prompts."""
TWO = ONE.model_copy(update={"generation": CONFIG.generation.model_copy(update={"replicas": 2})})
NOTHING_FINISHES: list[int] = []

MakeWorkshop = Callable[..., Workshop]


@pytest.fixture
def make_workshop(memory_store: MemoryStore, tokenizer: PreTrainedTokenizerFast) -> MakeWorkshop:
    return lambda config, **values: Workshop(memory_store, tokenizer, config, **values)


def prompts_in_flight(workshop: Workshop) -> dict[int, str]:
    """Prompt ids by group in flight."""
    return {request.group_id: request.prompt.prompt_id for request, _ in workshop.engine.requests}


def solve_all(workshop: Workshop, version: int, groups: range, incarnation: int = 0) -> None:
    """The step that made `version` trained these groups, and every response was right."""
    consume(workshop.store, version, {n: [1.0, 1.0] for n in groups}, incarnation=incarnation)


def test_solved_prompts_are_replaced_by_others(memory_store: MemoryStore, make_workshop: MakeWorkshop) -> None:
    create_run(memory_store, "run", ONE.model_dump(mode="json"))
    workshop = make_workshop(ONE)
    workshop.turn(range(4), new=weights(0))
    workshop.turn([3])
    assert [groups for groups, _ in workshop.committed()] == [[0, 1, 2], [3]]
    solve_all(workshop, 1, range(4))
    workshop.turn(range(8), new=weights(1))
    workshop.turn(range(8))
    workshop.turn(NOTHING_FINISHES, new=weights(2))
    assert prompts_in_flight(workshop) == {8: "p8", 9: "p4", 10: "p5"}, "not p0, p1, which are due at turn 4"
    workshop.stage.update_status(now=True)
    assert StatusReader(memory_store).look()["curriculum"] == {"easy": 4 / 9, "hard": 0.0}
    workshop.stage.close()
    rows = StreamReader(memory_store, layout.metrics("generate", 0), METRIC).next()
    assert rows is not None
    shares = [row["value"] for row in rows.table.to_pylist() if row["name"] == "easy_prompt_share"]
    assert shares == [0.0, 0.0, 4 / 9]


def test_without_a_curriculum_nothing_is_stored_or_shown(
    memory_store: MemoryStore, make_workshop: MakeWorkshop
) -> None:
    create_run(memory_store, "run", CONFIG.model_dump(mode="json"))
    workshop = make_workshop(CONFIG)
    workshop.turn(NOTHING_FINISHES, new=weights(0))
    assert memory_store.list(layout.PROMPT_BLOCKS) == []
    assert StatusReader(memory_store).look()["curriculum"] is None


def test_two_generators_agree_on_the_order_of_prompts(memory_store: MemoryStore, make_workshop: MakeWorkshop) -> None:
    first, second = (make_workshop(TWO, replica=replica) for replica in (0, 1))
    first.turn([0, 2], new=weights(0))
    second.turn([1, 3], new=weights(0))
    first.turn(NOTHING_FINISHES, new=weights(1))
    assert prompts_in_flight(first) == {4: "p4", 6: "p6"}
    solve_all(first, 1, range(4))
    second.turn(NOTHING_FINISHES, new=weights(2))
    assert prompts_in_flight(second) == {5: "p5", 7: "p7", 9: "p4"}, "the second block is the first generator's"
    first.turn([4, 6], new=weights(2))
    first.turn(NOTHING_FINISHES)
    assert prompts_in_flight(first) == {8: "p8", 10: "p5"}, "the third is the second generator's"


def test_a_group_keeps_its_prompt_through_rollback_and_restart(
    memory_store: MemoryStore, make_workshop: MakeWorkshop
) -> None:
    workshop = make_workshop(ONE)
    workshop.turn(range(4), new=weights(0))
    workshop.turn([3])
    solve_all(workshop, 1, range(4))
    workshop.turn(range(8), new=weights(1))
    workshop.turn([7])
    workshop.turn(NOTHING_FINISHES, new=weights(2))
    prompts = prompts_in_flight(workshop)
    assert prompts == {8: "p8", 9: "p4", 10: "p5"}
    # A trainer that lost its steps; now the policy solves those prompts only sometimes.
    workshop.turn(range(8), new=weights(0, incarnation=1))
    consume(memory_store, 1, {n: [0.0, 1.0] for n in range(4)}, incarnation=1)
    workshop.turn(range(8), new=weights(1, incarnation=1))
    workshop.turn([7])
    workshop.turn(NOTHING_FINISHES, new=weights(2, incarnation=1))
    assert prompts_in_flight(workshop) == prompts
    successor = make_workshop(ONE)
    successor.turn(NOTHING_FINISHES, new=weights(2, incarnation=1))
    assert prompts_in_flight(successor) == prompts


def test_a_missing_block_of_the_curriculum_is_corrupt(memory_store: MemoryStore, make_workshop: MakeWorkshop) -> None:
    workshop = make_workshop(ONE)
    workshop.turn([0, 1], new=weights(0))
    workshop.carry_over.store(0)
    memory_store.delete(layout.prompt_block(0))
    successor = make_workshop(ONE)
    with pytest.raises(StreamCorrupt) as caught:
        successor.turn(NOTHING_FINISHES, new=weights(0))
    assert caught.value.file == layout.prompt_block(0)
