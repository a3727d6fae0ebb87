"""Compilers are found where Inductor and Triton look for them."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from millrace.models import compiler


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of commands, still empty."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def add(commands: Path, names: Iterable[str]) -> None:
    for name in names:
        (commands / name).write_text("#!/bin/sh\n")
        (commands / name).chmod(0o755)


@pytest.mark.parametrize(
    ("device", "installed", "found"),
    [
        ("cpu", ["g++", "gcc", "clang"], "g++"),
        ("cpu", ["gcc", "clang"], None),
        ("cuda", ["clang", "gcc"], "gcc"),
        ("cuda", ["clang"], "clang"),
        ("cuda", ["g++"], None),
        ("cuda", [], None),
    ],
)
def test_each_device_has_its_compilers(commands: Path, device: str, installed: list[str], found: str | None) -> None:
    add(commands, installed)
    assert compiler.find_compiler(device) == (None if found is None else str(commands / found))


@pytest.mark.parametrize(("device", "variable"), [("cpu", "CXX"), ("cuda", "CC")])
def test_the_compiler_that_the_environment_names_is_the_only_one(
    commands: Path, monkeypatch: pytest.MonkeyPatch, device: str, variable: str
) -> None:
    add(commands, ["g++", "gcc", "own"])
    monkeypatch.setenv(variable, "own")
    assert compiler.find_compiler(device) == str(commands / "own")
    monkeypatch.setenv(variable, "/nowhere/own")
    assert compiler.find_compiler(device) is None


@pytest.mark.parametrize(
    ("installed", "header", "expected"),
    [
        (["g++"], True, []),
        (["g++"], False, ["Python.h"]),
        ([], True, ["C++ compiler"]),
        ([], False, ["C++ compiler", "Python.h"]),
    ],
)
def test_all_that_is_missing_is_named(
    commands: Path, monkeypatch: pytest.MonkeyPatch, installed: list[str], header: bool, expected: list[str]
) -> None:
    add(commands, installed)
    monkeypatch.setattr(compiler, "has_python_header", lambda: header)
    missing = compiler.missing_for_compilation("cpu")
    assert [name for name in ("C++ compiler", "Python.h") if name in missing] == expected
    assert bool(missing) == bool(expected)
