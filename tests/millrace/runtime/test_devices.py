"""GPUs of a host, divided among its stages."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import RunConfig
from millrace.errors import DevicesInUse, InputError
from millrace.runtime.devices import Process, assign


def config_of(
    *,
    replicas: int = 1,
    engine_args: dict[str, int] | None = None,
    data: int = 1,
    tensor: int = 1,
    hosts: int = 1,
    scorers: int = 0,
    **sections: Any,
) -> RunConfig:
    """Generators by vLLM, a trainer on GPUs, and reward models on GPUs if there are `scorers`."""
    network = {"work_pool": "trainers", "hosts": hosts, "network": "10.0.0.0/24"} if hosts > 1 else {}
    placement = {"train": network, **sections.pop("placement", {})}
    values = {
        "generation": {
            "engine": "vllm", "replicas": replicas, "engine_args": engine_args or {}, "groups_per_batch": 1,
        },
        "scoring": {"reward": "reward_model", "device": "cuda", "replicas": scorers} if scorers else {},
        "training": {
            "max_steps": 1, "device": "cuda", "groups_per_step": replicas, "parallel": {"data": data, "tensor": tensor},
        },
        "weights": {"transport": "store" if hosts > 1 else "shm"},
        "placement": placement,
        **sections,
    }  # fmt: skip
    return RunConfig.model_validate(values)


def host(count: int) -> list[str]:
    return [str(index) for index in range(count)]


def processes_of(config: RunConfig) -> list[Process]:
    counts = {"train": 1, "generate": config.generation.replicas, "score": config.scoring.replicas, "evaluate": 1}
    return [(stage, replica) for stage, count in counts.items() for replica in range(count)]


def check_groups(devices: Sequence[str], group: int) -> None:
    """Each group of tensor ranks is neighbours, within a pair or island of NVLink if its size is a power of two."""
    positions = [int(device) for device in devices]
    for first in range(0, len(positions), group):
        start = positions[first]
        assert positions[first : first + group] == list(range(start, start + group))
        assert start % (group & -group) == 0


layouts = st.fixed_dictionaries(
    {
        "replicas": st.integers(1, 6),
        "engine_args": st.fixed_dictionaries(
            {"tensor_parallel_size": st.integers(1, 8)}, optional={"pipeline_parallel_size": st.integers(1, 2)}
        ),
        "data": st.integers(1, 4),
        "tensor": st.integers(1, 8),
        "hosts": st.sampled_from([1, 1, 2, 4]),
        "scorers": st.integers(0, 3),
    }
)


@given(layout=layouts, spare=st.integers(0, 2), turns=st.booleans())
def test_every_process_gets_its_own_neighbours_if_there_are_enough(
    layout: dict[str, Any], spare: int, turns: bool
) -> None:
    # `data` is per host; a trainer on several hosts shares this one, the pool's, with all other processes.
    layout = {**layout, "data": layout["data"] * layout["hosts"]}
    turns = turns and layout["hosts"] == 1
    by_turns: dict[str, Any] = {"placement": {"colocated": True}, "pipeline": {"mode": "sync"}} if turns else {}
    config = config_of(**layout, **by_turns)
    group = layout["engine_args"]["tensor_parallel_size"]
    generator = group * layout["engine_args"].get("pipeline_parallel_size", 1)
    trainer = layout["data"] // layout["hosts"] * layout["tensor"]
    generators = layout["replicas"] * generator
    needed = (max(trainer, generators) if turns else trainer + generators) + layout["scorers"]

    assignment = assign(config, processes_of(config), host(needed + spare))
    assert assignment == assign(config, reversed(processes_of(config)), host(needed + spare)), "deterministic"
    assert len(assignment["train", 0]) == trainer
    check_groups(assignment["train", 0], layout["tensor"])
    of_generators = [assignment["generate", replica] for replica in range(layout["replicas"])]
    for devices in of_generators:
        assert len(devices) == generator
        check_groups(devices, group)
    of_scorers = [assignment["score", replica] for replica in range(layout["scorers"])]
    assert all(len(devices) == 1 for devices in of_scorers)
    apart = [[assignment["train", 0]], of_generators, of_scorers]
    if turns:
        assert set(assignment["train", 0]) == set(host(trainer))
        assert {device for devices in of_generators for device in devices} == set(host(generators))
        apart = [apart[1], of_scorers] if generators > trainer else [apart[0], of_scorers]
    given_away = [device for part in apart for devices in part for device in devices]
    assert len(set(given_away)) == len(given_away) == needed
    assert set(given_away) <= set(host(needed + spare))
    assert assignment.get(("evaluate", 0)) == (of_scorers[0] if of_scorers else None)

    with pytest.raises(InputError) as too_few:
        assign(config, processes_of(config), host(needed - 1))
    assert f"= {needed} GPU" in too_few.value.read
    assert f" has {needed - 1 or 'none'}" in too_few.value.read


@given(layout=layouts, busy=st.sets(st.sampled_from(host(8))))
def test_used_devices_are_left_alone_or_named(layout: dict[str, Any], busy: set[str]) -> None:
    config = config_of(**{**layout, "hosts": 1})
    used = dict.fromkeys(busy, "runs/other")
    try:
        assignment = assign(config, processes_of(config), host(8), used)
    except DevicesInUse as error:
        assert all(f"{device} by runs/other" in error.read for device in busy)
        assign(config, processes_of(config), host(8))
    except InputError:
        with pytest.raises(InputError):
            assign(config, processes_of(config), host(8))
    else:
        assert not busy & {device for devices in assignment.values() for device in devices}


def test_the_sum_names_every_factor() -> None:
    config = config_of(
        replicas=2, engine_args={"tensor_parallel_size": 2, "data_parallel_size": 2}, data=2, tensor=2, scorers=1
    )
    with pytest.raises(InputError) as caught:
        assign(config, processes_of(config), host(8))
    total, _, has = caught.value.read.partition("; ")
    assert total == (
        "generation.replicas 2 × tensor_parallel_size 2 × data_parallel_size 2 + 4 trainer ranks + 1 reward model = "
        "13 GPUs"
    )
    assert has.endswith(" has 8")


@pytest.mark.parametrize(("devices", "expected"), [(None, {}), (["7"], {("generate", 0): ("7",)})])
def test_vllm_generates_on_the_cpu_where_torch_is_built_for_it(
    devices: list[str] | None, expected: dict[Process, tuple[str, ...]]
) -> None:
    config = config_of()
    config = config.model_copy(update={"training": config.training.model_copy(update={"device": "cpu"})})
    assert assign(config, processes_of(config), devices) == expected


def test_a_host_without_gpus_is_refused_where_torch_is_built_for_them() -> None:
    with pytest.raises(InputError) as caught:
        assign(config_of(), [("generate", 0)], [])
    assert caught.value.read.endswith(" has none")


def test_stages_on_the_cpu_get_no_devices() -> None:
    config = RunConfig.model_validate({"training": {"max_steps": 1}})
    assert assign(config, processes_of(config), host(8)) == {}


def test_named_devices_are_divided_in_their_order_and_others_avoid_them() -> None:
    names = ["MIG-b", "GPU-c", "GPU-a"]
    placement = {"generate": {"devices": ["GPU-c", "MIG-b"]}}
    config = config_of(replicas=2, placement=placement)
    assert assign(config, processes_of(config), names) == {
        ("generate", 0): ("GPU-c",),
        ("generate", 1): ("MIG-b",),
        ("train", 0): ("GPU-a",),
    }
    by_index = config_of(engine_args={"tensor_parallel_size": 2}, placement={"generate": {"devices": [2, 1]}})
    assert assign(by_index, processes_of(by_index), host(3))["generate", 0] == ("2", "1")


@pytest.mark.parametrize(
    ("placement", "key"),
    [
        ({"generate": {"devices": [1, 8]}}, "placement.generate.devices"),
        ({"train": {"devices": ["GPU-1"]}}, "placement.train.devices"),
        ({"train": {"devices": [1]}, "generate": {"devices": [1]}}, None),
        ({"generate": {"devices": [1]}}, None),
    ],
)
def test_unknown_shared_or_too_few_named_devices_are_refused(placement: dict[str, Any], key: str | None) -> None:
    config = config_of(replicas=2 if "train" not in placement else 1, placement=placement)
    with pytest.raises(InputError) as caught:
        assign(config, processes_of(config), host(8))
    assert caught.value.key == key


def test_trainer_and_generators_that_take_turns_share_the_named_devices() -> None:
    placement = {"colocated": True, "train": {"devices": [5, 4]}}
    config = config_of(replicas=2, data=2, placement=placement, pipeline={"mode": "sync"})
    assert assign(config, processes_of(config), host(8)) == {
        ("train", 0): ("5", "4"),
        ("generate", 0): ("5",),
        ("generate", 1): ("4",),
    }


@pytest.mark.parametrize("size", [0, "2", True])
def test_a_size_that_is_no_number_is_named(size: object) -> None:
    config = config_of(engine_args={"tensor_parallel_size": size})  # type: ignore[dict-item]
    with pytest.raises(InputError) as caught:
        assign(config, [("generate", 0)], host(1))
    assert caught.value.key == "generation.engine_args.tensor_parallel_size"
