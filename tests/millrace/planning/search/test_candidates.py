"""Configs that a search looks at."""

from typing import Any

import pytest
from millrace.planning.search.candidates import (
    bounds_up_to,
    differing,
    layouts,
    schedules,
    smaller_generator,
    smaller_trainer,
)
from support.planning.small_machine import SmallMachine

from configs.schema import RunConfig


def config(**sections: dict[str, Any]) -> RunConfig:
    values: dict[str, Any] = {
        "training": {"max_steps": 3, "groups_per_step": 16},
        "generation": {"group_size": 4, "max_new_tokens": 128},
        "staleness": {"max_staleness": 2},
    }
    return RunConfig.model_validate({name: values.get(name, {}) | sections.get(name, {}) for name in values | sections})


@pytest.mark.parametrize("gpus", [1, 2, 7, 16, 100])
def test_no_layout_takes_more_gpus_than_there_are(gpus: int) -> None:
    found = list(layouts(config(), SmallMachine(), gpus, ()))
    assert found
    assert max(one.gpus for one in found) <= gpus
    assert any(one.gpus == gpus for one in found)


def test_every_layout_is_a_config_that_loads_with_its_overrides() -> None:
    base = config(generation={"group_size": 4, "max_new_tokens": 128})
    for one in layouts(base, SmallMachine(), 8, ()):
        assert one.config.training.groups_per_step % one.config.generation.replicas == 0
        assert one.config.training.device == "cuda"
        assert one.config.generation.engine == "vllm"


def test_generators_and_ranks_come_in_the_sizes_that_divide_the_model() -> None:
    found = list(layouts(config(), SmallMachine(), 64, ()))
    assert {one.generator_tensor for one in found} == {1, 2, 4}
    assert {one.config.training.parallel.tensor for one in found} == {1, 2}


def test_only_synchronous_stages_take_turns_on_the_same_gpus() -> None:
    turns = [one for one in layouts(config(), SmallMachine(), 8, ()) if one.config.placement.colocated]
    assert turns
    assert {one.config.pipeline.mode for one in turns} == {"sync"}
    assert {(one.trainer_gpus, one.generator_gpus) for one in turns} == {(8, 8)}


def test_without_gpus_to_divide_there_are_one_to_four_generators() -> None:
    found = list(layouts(config(), SmallMachine(), None, ()))
    assert {one.config.generation.replicas for one in found} == {1, 2, 4}
    assert {one.config.training.device for one in found} == {"cpu"}


def test_places_stay_within_what_the_bound_admits_and_an_engine_s_limit_follows_them() -> None:
    base = config(
        generation={"engine": "vllm", "group_size": 4, "max_new_tokens": 128, "engine_args": {"max_num_seqs": 9}}
    )
    layout = next(one for one in layouts(base, SmallMachine(), 2, ()) if one.config.pipeline.mode == "async")
    found = list(schedules(base, layout, bounds_up_to(2)))
    assert {one.config.staleness.max_staleness for one in found} == {1, 2}
    for one in found:
        generation = one.config.generation
        assert generation.engine_args["max_num_seqs"] == generation.groups_per_batch * 4
        assert generation.groups_per_batch <= 16 * (one.config.staleness.max_staleness + 1)


def test_a_trainer_gets_smaller_until_a_microbatch_has_room_for_four_responses() -> None:
    base = config(training={"max_steps": 3, "groups_per_step": 16, "max_tokens_per_microbatch": 2048})
    one = next(layouts(base, SmallMachine(), 2, ()))
    seen = []
    while (smaller := smaller_trainer(base, one)) is not None:
        one = smaller
        seen.append((one.config.training.activation_checkpointing, one.config.training.max_tokens_per_microbatch))
    assert seen == [(True, 2048), (True, 1024), (True, 512)]


def test_a_generator_gets_smaller_until_it_has_one_place() -> None:
    one = next(layouts(config(), SmallMachine(), 2, ()))
    seen = []
    while (smaller := smaller_generator(config(), one)) is not None:
        one = smaller
        seen.append(one.config.generation.groups_per_batch)
    assert seen == [8, 4, 2, 1]


def test_only_what_changes_something_is_a_change() -> None:
    overrides = {"training.groups_per_step": 16, "generation.replicas": 2, "generation.engine_args.max_num_seqs": 3}
    assert differing(config(), overrides) == {"generation.replicas": 2, "generation.engine_args.max_num_seqs": 3}
