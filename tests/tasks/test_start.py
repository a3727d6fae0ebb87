"""The environment of a stage process that is started as a command."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.campaigns.campaigns import wait_until

from configs.schema import RunConfig
from millrace.runtime.arguments import StageArguments
from millrace.runtime.devices import assign
from tasks.jobs import jobs, processes_here
from tasks.start import Process, kill, start_stage


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


def visible_devices(process: Process) -> str | None:
    """CUDA_VISIBLE_DEVICES as the program got it."""

    def environment() -> dict[str, str]:
        return psutil.Process(process.pid).environ()

    wait_until(lambda: "OMP_NUM_THREADS" in environment(), "the program to be executed")
    return environment().get("CUDA_VISIBLE_DEVICES")


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
