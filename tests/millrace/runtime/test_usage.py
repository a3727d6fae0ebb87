"""The CPU time and memory of a process and its descendants, and the use of its GPUs."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace

import pytest

from millrace.runtime import usage
from millrace.runtime.usage import GPU_BUSY_SHARE, GPU_MEMORY_BYTES, Gpus, ProcessTree

_BURN = "import os, sys, time\nblock = bytearray(64 << 20)\nprint('ready', flush=True)\nwhile True: sum(range(10000))"
_DEADLINE = 60.0


def look_later(tree: ProcessTree) -> tuple[float, int]:
    time.sleep(0.05)
    return tree.look()


def test_cpu_and_memory_of_a_grandchild_count() -> None:
    tree = ProcessTree()
    _, memory = look_later(tree)
    shell = f'exec 3>&1; {sys.executable} -c "{_BURN}" & echo $!; wait'
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        try:
            assert child.stdout.readline() == "ready\n"
            deadline = time.monotonic() + _DEADLINE
            while (now := look_later(tree))[0] < 0.05 or now[1] < memory + (64 << 20):
                assert time.monotonic() < deadline, now
        finally:
            os.kill(grandchild, 9)


def test_cpu_time_of_an_ended_child_is_kept() -> None:
    tree = ProcessTree()
    subprocess.run([sys.executable, "-c", "for _ in range(200): sum(range(10000))"], check=True)
    assert look_later(tree)[0] > 0
    assert look_later(tree)[0] >= 0


class FakeNVML(ModuleType):
    """NVIDIA's management library over GPUs with these names: percent of the time busy, and bytes in use."""

    class NVMLError(Exception):
        """The base of NVML's errors."""

    def __init__(self, gpus: Mapping[str, tuple[int, int]]) -> None:
        super().__init__("pynvml")
        self.gpus = gpus
        self.calls = 0
        self.nvmlInit: Callable[[], None] = lambda: None
        self.nvmlDeviceGetHandleByIndex = self.nvmlDeviceGetHandleByUUID = str

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        self.calls += 1
        if handle.startswith("MIG-"):
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.gpus[handle][0], memory=99)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=self.gpus[handle][1], total=80 << 30)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNVML:
    fake = FakeNVML({"0": (90, 1 << 30), "3": (40, 2 << 30), "GPU-5": (10, 5 << 30)})
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.mark.parametrize(
    ("devices", "used"),
    [
        ((), {}),
        (("3",), {GPU_BUSY_SHARE: 0.4, GPU_MEMORY_BYTES: 2 << 30}),
        (("0", "GPU-5"), {GPU_BUSY_SHARE: 0.5, GPU_MEMORY_BYTES: 6 << 30}),
    ],
)
def test_only_the_gpus_of_a_process_count(nvml: FakeNVML, devices: tuple[str, ...], used: dict[str, float]) -> None:
    said: list[str] = []
    gpus = Gpus(devices, said.append)
    assert [gpus.look(), gpus.look()] == [pytest.approx(used)] * 2
    assert not said


def test_a_stage_that_looks_when_its_gpus_are_idle_has_measured_their_work(
    nvml: FakeNVML, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "_SAMPLE_SECONDS", 0.0)
    gpus = Gpus(("0",), print)
    for percent, nbytes in ((100, 30), (80, 70)):
        nvml.gpus = {"0": (percent, nbytes)}
        gpus.sample()
    nvml.gpus = {"0": (0, 10)}
    assert gpus.look() == pytest.approx({GPU_BUSY_SHARE: 0.6, GPU_MEMORY_BYTES: 70})
    assert gpus.look() == pytest.approx({GPU_BUSY_SHARE: 0.0, GPU_MEMORY_BYTES: 10})


def test_gpus_that_cannot_be_measured_are_said_once(nvml: FakeNVML) -> None:
    said: list[str] = []
    gpus = Gpus(("MIG-1",), said.append)
    assert [gpus.look(), gpus.look()] == [{}, {}]
    assert len(said) == nvml.calls == 1
    assert "Not Supported" in said[0]


def test_without_nvml_a_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    said: list[str] = []
    gpus = Gpus(("0",), said.append)
    assert [gpus.look(), gpus.look()] == [{}, {}]
    assert len(said) == 1
