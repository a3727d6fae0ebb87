"""A generator of a mixture: each group has the prompts, the size and the sampling of its source."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support.stages.workshop import CONFIG, Workshop, weights
from support.streams.scored_groups import consume
from transformers import PreTrainedTokenizerFast

from configs.schema import RunConfig
from millrace.runs.record import create_run
from millrace.runs.status import StatusReader
from storage import layout
from storage.progress import read_status
from storage.schema import METRIC, TRAJECTORY
from storage.stores.memory import MemoryStore
from storage.streams.stream import StreamReader

SOURCES = {
    "sums": {"weight": 3.0, "generation": {"max_new_tokens": 5}},
    "words": {"generation": {"group_size": 3, "temperature": 0.5, "top_p": 0.75}, "environment": {"name": None}},
}
MIXED = RunConfig(**{**CONFIG.model_dump(exclude_unset=True), "sources": SOURCES})

MakeWorkshop = Callable[..., Workshop]


@pytest.fixture
def make_workshop(memory_store: MemoryStore, tokenizer: PreTrainedTokenizerFast) -> MakeWorkshop:
    return lambda config, **values: Workshop(memory_store, tokenizer, config, **values)


def rows_of(workshop: Workshop, *names: str) -> list[dict[str, Any]]:
    """These columns of the committed rows."""
    reader, rows = StreamReader(workshop.store, layout.trajectories(0), TRAJECTORY), []
    while (part := reader.next()) is not None:
        rows += part.table.select([*names]).to_pylist()
    return rows


def test_groups_have_the_size_and_the_sampling_of_their_source(make_workshop: MakeWorkshop) -> None:
    workshop = make_workshop(MIXED)
    workshop.turn(range(8), new=weights(0))
    workshop.turn(range(8))
    workshop.turn(range(8))
    rows = rows_of(workshop, "source", "group_id", "sample_index", "temperature", "top_p", "max_new_tokens")
    expected = {"sums": (2, 1.0, 1.0, 5), "words": (3, 0.5, 0.75, 16)}
    sources = {row["group_id"]: row["source"] for row in rows}
    assert Counter(sources.values()) == {"sums": 6, "words": 2}
    for group_id, source in sources.items():
        size, *sampling = expected[source]
        group = [row for row in rows if row["group_id"] == group_id]
        assert [row["sample_index"] for row in group] == list(range(size))
        assert {(row["temperature"], row["top_p"], row["max_new_tokens"]) for row in group} == {tuple(sampling)}


def test_a_generator_has_room_for_its_groups_of_any_source(make_workshop: MakeWorkshop) -> None:
    workshop = make_workshop(MIXED)
    workshop.turn([], new=weights(0))
    assert workshop.engine.in_flight <= 3 * 3
    assert len(workshop.in_flight) >= 3


def test_a_restarted_generator_continues_unfinished_groups_of_any_source(make_workshop: MakeWorkshop) -> None:
    workshop = make_workshop(MIXED)
    workshop.turn([0], new=weights(0))
    in_flight = {(request.group_id, request.sample_index): request.source for request, _ in workshop.engine.requests}
    workshop.carry_over.store(0)
    successor = make_workshop(MIXED)
    successor.turn([], new=weights(0))
    continued = {
        (request.group_id, request.sample_index): request.source
        for request, _ in successor.engine.requests
        if request.response_tokens
    }
    assert continued == in_flight
    assert {*continued.values()} == {"sums", "words"}


def test_weights_of_sources_are_metrics_of_each_new_block(
    memory_store: MemoryStore, make_workshop: MakeWorkshop
) -> None:
    create_run(memory_store, "run", MIXED.model_dump(mode="json"))
    workshop = make_workshop(MIXED)
    workshop.turn([], new=weights(0))
    workshop.stage.close()
    part = StreamReader(memory_store, layout.metrics("generate", 0), METRIC).next()
    assert part is not None
    logged = {row["name"]: row["value"] for row in part.table.to_pylist() if row["name"].startswith("source_weight/")}
    assert logged == {"source_weight/sums": 3.0, "source_weight/words": 1.0}
    assert StatusReader(memory_store).look()["curriculum"] is None


def test_the_status_record_has_the_weights_of_the_newest_block_after_a_restart(make_workshop: MakeWorkshop) -> None:
    make_workshop(MIXED).turn([], new=weights(0))
    successor = make_workshop(MIXED)
    successor.turn([], new=weights(0))
    successor.stage.update_status(now=True)
    assert read_status(successor.store, "generate", 0)["source_weights"] == {"sums": 3.0, "words": 1.0}


def test_a_mixture_with_a_curriculum_shows_the_share_of_all_its_prompts(
    memory_store: MemoryStore, make_workshop: MakeWorkshop
) -> None:
    sources = {**SOURCES, "words": {"prompts": {"curriculum_window": 1}, "generation": {"group_size": 2}}}
    config = RunConfig(
        **{**CONFIG.model_dump(exclude_unset=True), "sources": sources, "staleness": {"max_staleness": 0}}
    )
    create_run(memory_store, "run", config.model_dump(mode="json"))
    workshop = make_workshop(config)
    workshop.turn(range(4), new=weights(0))
    workshop.turn(range(4))
    consume(memory_store, 1, {n: [1.0, 1.0] for n in range(4)})
    workshop.turn([], new=weights(2))
    workshop.turn(range(8))
    workshop.stage.update_status(now=True)
    assert StatusReader(memory_store).look()["curriculum"] == {"easy": 1 / 18, "hard": 0.0}, "of 9 prompts each"


def test_a_run_with_one_named_source_has_the_prompts_of_a_run_without_sources(
    memory_store: MemoryStore, make_workshop: MakeWorkshop
) -> None:
    named = make_workshop(RunConfig(**{**CONFIG.model_dump(exclude_unset=True), "sources": {"sums": {}}}))
    plain = make_workshop(CONFIG)
    for workshop in (named, plain):
        workshop.turn([], new=weights(0))
    requests = [
        [(request.prompt, request.prompt_tokens, request.seed) for request, _ in workshop.engine.requests]
        for workshop in (named, plain)
    ]
    assert requests[0] == requests[1]
