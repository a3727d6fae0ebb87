"""A driver that is missing or too old for the pinned torch is named before anything is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.doctor.driver import query_gpus

ROOT = Path(__file__).parents[3]
NO_DRIVER = "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9"


def check(folder: Path, nvidia_smi: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the check where `nvidia-smi` is this shell script; None: where there is no such command."""
    if nvidia_smi is not None:
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{nvidia_smi}\n")
        (folder / "nvidia-smi").chmod(0o755)
    # Only what stands in Python's library is there before the installation.
    command = [sys.executable, "-S", "-m", "millrace.doctor.driver", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PATH": str(folder)})


@pytest.mark.parametrize("version", ["580.65.06", "600.10"])
def test_a_new_enough_driver_passes_in_silence(tmp_path: Path, version: str) -> None:
    ended = check(tmp_path, f"echo {version}; echo {version}")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("nvidia_smi", "read"),
    [("echo 575.57.08", "575.57.08"), ("echo '[N/A]'", "[N/A]"), (NO_DRIVER, "none"), (None, "none")],
)
def test_any_other_driver_gets_one_line_and_exit_code_2(tmp_path: Path, nvidia_smi: str | None, read: str) -> None:
    ended = check(tmp_path, nvidia_smi)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert f"is {read}" in ended.stderr and "580" in ended.stderr


def test_a_named_driver_stands_for_that_of_this_machine(tmp_path: Path) -> None:
    assert check(tmp_path, None, "580").returncode == 0
    assert check(tmp_path, "echo 580.65.06", "570.1").returncode == 2


def test_the_fields_of_each_gpu_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tmp_path, 'echo "$@"; echo second')
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_gpus("name", "driver_version") == ["--query-gpu=name,driver_version --format=csv,noheader", "second"]
