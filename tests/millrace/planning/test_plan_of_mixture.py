"""A plan of a mixture: means by the weights of its sources, room for the largest."""

from typing import Any

import pytest

from configs.requests import PlanRequest
from configs.schema import RunConfig
from flows.operations.planning import answer, sections
from millrace.planning.durations import max_group_size, max_new_tokens, mean_group_size
from millrace.planning.gpus import GpuMachine
from millrace.planning.hardware import hardware_named
from millrace.planning.models import model_named
from millrace.planning.search import simulator


def mixture(*, weights: tuple[float, float] = (3.0, 1.0), **sections: Any) -> RunConfig:
    """Short answers in groups of 4, and long ones in groups of 8."""
    short, long = weights
    sources = {
        "short": {"weight": short, "generation": {"group_size": 4, "max_new_tokens": 64}},
        "long": {"weight": long, "generation": {"max_new_tokens": 512}},
    }
    training = {"max_steps": 9, "groups_per_step": 32, "device": "cuda"}
    generation = {"engine": "vllm", "groups_per_batch": 32}
    return RunConfig.model_validate({"sources": sources, "training": training, "generation": generation, **sections})


def machine() -> GpuMachine:
    return GpuMachine(shape=model_named("qwen3-1.7b"), hardware=hardware_named("h100"))


def test_group_sizes_are_weighted_and_the_largest_needs_room() -> None:
    config = mixture()
    assert mean_group_size(config) == 5
    assert (max_group_size(config), max_new_tokens(config)) == (8, 512)


def test_each_source_has_its_share_of_the_groups_and_its_own_lengths() -> None:
    lengths = machine().lengths(mixture())
    sizes = [len(responses) for _, responses in map(lengths.of_group, range(1000))]
    assert set(sizes) == {4, 8}
    assert sizes.count(8) / 1000 == pytest.approx(0.25, abs=0.05)
    assert lengths.means.response < machine().lengths(mixture(weights=(1.0, 3.0))).means.response
    short = [max(responses) for _, responses in map(lengths.of_group, range(200)) if len(responses) == 4]
    assert max(short) <= 64


def test_one_source_is_planned_as_the_run_that_it_stands_for() -> None:
    generation = {"engine": "vllm", "groups_per_batch": 32, "max_new_tokens": 64}
    alone = mixture(generation=generation).model_copy(update={"sources": {}})
    named = RunConfig.model_validate(alone.model_dump(mode="json") | {"sources": {"sums": {"weight": 7.0}}})
    assert machine().lengths(named) is machine().lengths(alone)
    assert machine().memory(named) == machine().memory(alone)


def test_longer_responses_of_one_source_need_more_memory() -> None:
    longer = {"long": {"generation": {"max_new_tokens": 30_000}}, "short": {}}
    training = {"max_steps": 9, "max_tokens_per_microbatch": 40_000}
    config = RunConfig.model_validate({"sources": longer, "training": training})
    short = config.model_copy(update={"sources": {"short": config.sources["short"]}})
    assert machine().memory(config).generator > machine().memory(short).generator


def test_a_mixture_is_simulated() -> None:
    config = mixture()
    outcome = simulator(6)(config, machine().costs(config), machine().lengths(config))
    assert outcome.tokens_per_second > 0


def test_a_plan_of_a_mixture_says_how_large_its_batches_are() -> None:
    request = PlanRequest(hardware="h100", gpus=2, model="qwen3-1.7b", steps=4)
    figures = {row[0]: row[1] for table in sections(answer(mixture(), request)) for row in table.rows}
    assert figures["batch"] == "32 × 5 responses per step"
