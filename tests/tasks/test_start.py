"""The environment of a stage process that is started as a command."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.campaigns.campaigns import wait_until

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.forking.stages import Process, kill
from millrace.runtime.arguments import StageArguments
from millrace.runtime.devices import assign
from tasks.jobs import jobs, processes_here
from tasks.start import start_stage


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, StageArguments, RunConfig], Process]]:
    started = []

    def start(stage: str, arguments: StageArguments, config: RunConfig) -> Process:
        with Path(os.devnull).open("ab") as log:
            started.append(start_stage(stage, arguments, config, log, 1, lambda line: None))
        return started[-1]

    yield start
    for process in started:
        kill(process)


def environment_of(process: Process) -> dict[str, str]:
    """The environment as the program got it."""

    def environment() -> dict[str, str]:
        return psutil.Process(process.pid).environ()

    wait_until(lambda: "OMP_NUM_THREADS" in environment(), "the program to be executed")
    return environment()


def visible_devices(process: Process) -> str | None:
    return environment_of(process).get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize("hosts", [1, 2], ids=["one host", "a host of two"])
def test_started_stages_have_disjoint_devices(
    start: Callable[[str, StageArguments, RunConfig], Process], hosts: int
) -> None:
    place = {"work_pool": "gpus", "hosts": 2, "network": "127.0.0.0/8"} if hosts > 1 else {}
    config = RunConfig.model_validate(
        {
            "generation": {"engine": "vllm", "replicas": 2, "engine_args": {"tensor_parallel_size": 2}},
            "training": {"max_steps": 1, "device": "cuda", "parallel": {"data": 2 * hosts, "tensor": 2}},
            "weights": {"transport": "store"},
            "placement": {"train": place},
        }
    )
    processes = [member for job in jobs(config)[:1] for member in job.members] + processes_here(config)
    assignment = assign(config, dict.fromkeys(processes), [str(index) for index in range(8)])
    arguments = StageArguments(run_url="memory://none", attempt=0, replica=0, handover=Path("/nowhere"))
    started = {
        process: start(
            process[0], StageArguments(**{**vars(arguments), "replica": process[1], "devices": names}), config
        )
        for process, names in assignment.items()
    }
    trainer = StageArguments(**{**vars(arguments), "devices": assignment["train", 0]})
    assert StageArguments.parse(trainer.as_argv()) == trainer
    assert {process: visible_devices(popen) for process, popen in started.items()} == {
        ("train", 0): "0,1,2,3",
        ("generate", 0): "4,5",
        ("generate", 1): "6,7",
    }


def test_a_stage_without_gpus_keeps_the_environment(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[str, StageArguments, RunConfig], Process]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    config = RunConfig.model_validate({"training": {"max_steps": 1, "parallel": {"data": 2}}})
    arguments = StageArguments(run_url="memory://none", attempt=0, replica=0, handover=Path("/nowhere"))
    assert visible_devices(start("train", arguments, config)) == "3"


@pytest.mark.parametrize(
    ("hosts", "pool", "network"),
    [
        (1, None, None),
        (1, None, "10.1.0.0/16"),
        (1, "gpus", "10.1.0.0/16"),
        (2, None, "10.1.0.0/16"),
        (2, "gpus", "10.1.0.0/16"),
    ],
)
def test_trainer_and_vllm_use_the_same_interface_which_follows_the_network(
    hosts: int,
    pool: str | None,
    network: str | None,
    start: Callable[[str, StageArguments, RunConfig], Process],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    address = SimpleNamespace(family=socket.AF_INET, address="10.1.2.3")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth1": [address]})
    config = RunConfig.model_validate(
        {
            "generation": {"engine": "vllm"},
            "training": {"max_steps": 1, "device": "cuda", "parallel": {"data": 2}},
            "placement": {
                "train": {"hosts": hosts, "network": network, "work_pool": "gpus" if hosts > 1 else None},
                "generate": {"work_pool": pool},
            },
        }
    )
    arguments = StageArguments(run_url="memory://none", attempt=0, replica=0, handover=Path("/nowhere"))
    interface = "lo" if network is None else "eth1"
    for stage in ("train", "generate"):
        environment = environment_of(start(stage, arguments, config))
        # gloo compares whole names; NCCL, without an equals sign, their beginnings.
        assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == (interface, f"={interface}")


def test_a_host_outside_the_network_is_refused_before_the_stage_starts(
    start: Callable[[str, StageArguments, RunConfig], Process],
) -> None:
    config = RunConfig.model_validate(
        {"training": {"max_steps": 1}, "placement": {"train": {"network": "203.0.113.0/24", "work_pool": "gpus"}}}
    )
    arguments = StageArguments(run_url="memory://none", attempt=0, replica=0, handover=Path("/nowhere"))
    with pytest.raises(InputError) as refused:
        start("train", arguments, config)
    assert refused.value.key == "placement.train.network"
