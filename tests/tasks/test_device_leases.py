"""Leases on GPUs: no two campaigns, jobs or replays of a machine have one at a time, whatever becomes of them."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.campaigns.campaigns import REPOSITORY

from configs.schema import RunConfig
from millrace.errors import DevicesInUse, InputError
from millrace.runtime import devices
from tasks import device_leases
from tasks.device_leases import leased_devices

FOUR = ("0", "1", "2", "MIG-GPU-a/3/0")


def generators(replicas: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "generation": {"engine": "vllm", "replicas": replicas, "groups_per_batch": 1},
            "training": {"max_steps": 1, "groups_per_step": replicas},
        }
    )


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_leases, "host_devices", lambda: FOUR)
    monkeypatch.setattr(device_leases, "memory_folder", lambda: tmp_path)


def test_two_jobs_of_a_host_get_different_devices_and_free_them_at_their_end() -> None:
    config = generators(2)
    with leased_devices(config, [("generate", 0)], "runs/a") as first:
        with leased_devices(config, [("generate", 1)], "runs/a") as second:
            assert (first, second) == ({("generate", 0): ("0",)}, {("generate", 1): ("1",)})
        with leased_devices(config, [("generate", 1)], "runs/b") as third:
            assert third == second


def test_devices_in_use_are_named_with_their_holder_and_none_is_kept() -> None:
    with leased_devices(generators(2), [("generate", 0), ("generate", 1)], "runs/a"):
        for _ in range(2):
            with (
                pytest.raises(DevicesInUse) as refused,
                leased_devices(generators(3), [("generate", n) for n in range(3)], "runs/b"),
            ):
                pass
            assert refused.value.read.endswith("has 4, in use: 0 by runs/a, 1 by runs/a")


def test_a_gpu_is_the_same_by_index_and_by_uuid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho '0, GPU-a'\necho '1, GPU-b'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with leased_devices(generators(1), [("generate", 0)], "runs/a") as by_index:
        monkeypatch.setattr(device_leases, "host_devices", lambda: ("GPU-a", "GPU-b"))
        with leased_devices(generators(1), [("generate", 0)], "runs/b") as by_uuid:
            assert (by_index["generate", 0], by_uuid["generate", 0]) == (("0",), ("GPU-b",))


def test_more_devices_than_a_host_has_are_not_waited_for() -> None:
    with (
        pytest.raises(InputError) as refused,
        leased_devices(generators(5), [("generate", n) for n in range(5)], "runs/a"),
    ):
        pass
    assert not isinstance(refused.value, DevicesInUse)


def test_the_leases_of_a_killed_process_are_free(tmp_path: Path) -> None:
    program = f"""
import time
from pathlib import Path
from tasks import device_leases
from tests.tasks.test_device_leases import FOUR, generators
device_leases.host_devices, device_leases.memory_folder = lambda: FOUR, lambda: Path({str(tmp_path)!r})
with device_leases.leased_devices(generators(4), [("generate", n) for n in range(4)], "runs/killed"):
    print("leased", flush=True)
    time.sleep(3600)
"""
    search = f"{REPOSITORY}:{REPOSITORY / 'tests'}"
    holder = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=REPOSITORY, env={"PYTHONPATH": search}
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"leased\n"
    with pytest.raises(DevicesInUse), leased_devices(generators(1), [("generate", 0)], "runs/a"):
        pass
    holder.kill()
    holder.wait()
    with leased_devices(generators(4), [("generate", n) for n in range(4)], "runs/a") as assignment:
        assert assignment["generate", 3] == (FOUR[3],)


def test_nobody_counts_gpus_for_stages_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_leases, "host_devices", pytest.fail)
    config = RunConfig.model_validate({"training": {"max_steps": 1}})
    with leased_devices(config, [("train", 0), ("generate", 0), ("score", 0), ("evaluate", 0)], "runs/a") as assignment:
        assert assignment == {}


@pytest.mark.parametrize(
    ("visible", "count", "names"),
    [
        (None, 3, ("0", "1", "2")),
        ("4, 6", 2, ("4", "6")),
        ("GPU-b,GPU-a", 2, ("GPU-b", "GPU-a")),
        ("0,9", 1, ("0",)),
        ("", 0, ()),
        ("MIG-a,MIG-b", 1, ("MIG-a", "MIG-b")),
    ],
)
def test_devices_keep_the_names_of_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, names: tuple[str, ...]
) -> None:
    monkeypatch.setattr(devices, "version", lambda package: "2.13.0")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.host_devices() == names


def test_a_torch_for_cpus_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    assert devices.host_devices() is None
