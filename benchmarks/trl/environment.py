"""TRL in an environment of its own, with the versions of torch and transformers that Millrace is tested with.

    constraints.txt ─► python -m venv ─► torch for CPUs, as in the Makefile ─► trl ─► the environment's python

A finished environment is used again. One of another version, or one left half-made, is made anew.
"""

import re
import subprocess
import sys
from pathlib import Path

TRL = "trl==1.16.0"

_CONSTRAINTS = Path("constraints.txt")
_STAMP = "requirements-installed.txt"
"""Written last, so an environment without it is half-made."""


def environment(folder: Path) -> Path:
    """The python of the environment in `folder`, which is made if it is missing; that takes some minutes."""
    torch = torch_requirement(_CONSTRAINTS.read_text())
    wanted = f"{torch}\n{TRL}\n"
    python, stamp = folder / "bin" / "python", folder / _STAMP
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        _install_torch(python, torch)
        _pip(python, TRL)
        stamp.write_text(wanted)
    return python


def torch_requirement(constraints: str) -> str:
    """The line of the tested version of torch, such as `torch==2.13.0`."""
    (line,) = re.findall(r"^torch==\S+", constraints, re.MULTILINE)
    return str(line)


def _install_torch(python: Path, torch: str) -> None:
    """Where pip would take the build with CUDA, uv takes the one for CPUs."""
    report = _pip(python, "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", torch)
    if re.search(r'"(nvidia|cuda)-', report):
        _pip(python, "uv")
        uv = [str(python.with_name("uv")), "pip", "install", "--python", str(python), "--torch-backend", "cpu"]
        subprocess.run([*uv, torch], check=True)
    else:
        _pip(python, torch)


def _pip(python: Path, *arguments: str) -> str:
    """What `pip install` prints; its complaints go to stderr."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--constraint", str(_CONSTRAINTS), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
