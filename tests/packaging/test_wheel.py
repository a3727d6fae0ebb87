"""What `pip install .` brings, which an editable install does not show."""

import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.campaigns.campaigns import REPOSITORY

pytestmark = pytest.mark.slow

_PACKAGES = ("benchmarks", "configs", "dashboard", "flows", "millrace", "storage", "tasks")
_LARGE = ("torch", "transformers", "duckdb", "plotly", "dash", "math-verify")
"""Take long to install, and their versions are not in question."""
_SERVES = """
from prefect.server.api.server import create_app
create_app(ephemeral=True)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(REPOSITORY)]
    subprocess.run(command, check=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def requirements(wheel: Path) -> list[Requirement]:
    """Without those of extras."""
    found = [Requirement(line) for line in metadata(wheel).get_all("Requires-Dist", [])]
    return [one for one in found if one.marker is None or "extra" not in str(one.marker)]


def test_every_file_of_every_package_is_in_the_wheel_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "millrace = flows.cli.main:main" in archive.read(entry_points).decode()
    files = {
        str(path.relative_to(REPOSITORY))
        for package in _PACKAGES
        for path in (REPOSITORY / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == files
    assert {
        "configs/presets/tiny-cpu.yaml",
        "configs/data/gsm8k-tiny.jsonl",
        "configs/kubernetes/work-pool.json",
    } <= inside
    assert any(name.startswith("dashboard/assets/") for name in inside)


def test_the_bounds_that_prefect_needs_reach_whoever_installs_it(wheel: Path) -> None:
    bounds = {one.name: one.specifier for one in requirements(wheel)}
    assert "0.136.3" in bounds["fastapi"]
    assert "0.137.0" not in bounds["fastapi"]
    assert "3.7.7" in bounds["prefect"]
    assert "3.7.8" not in bounds["prefect"]


@pytest.mark.extended
def test_in_a_new_environment_the_command_is_there_and_prefect_serves(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "new")], check=True)
    python = str(tmp_path / "new/bin/python")
    wanted = [str(one) for one in requirements(wheel) if one.name not in _LARGE]
    subprocess.run([python, "-m", "pip", "install", "-q", *wanted], check=True, timeout=550)
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True, timeout=100)
    alone = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PREFECT_HOME": str(tmp_path / "prefect")}
    subprocess.run([python, "-c", _SERVES], check=True, timeout=100, env=alone, cwd=tmp_path)
    shown = subprocess.run(
        [str(tmp_path / "new/bin/millrace"), "--help"],
        check=True, timeout=100, env=alone, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "run a campaign" in shown.stdout
