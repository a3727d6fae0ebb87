"""Names of environments: ours, a person's own by its import path, and one sentence for anything else."""

import sys
from pathlib import Path

import pytest
from support.engines.scripted_engine import Counting

from millrace.errors import InputError
from millrace.generation.environments.base import environment_class
from millrace.generation.environments.calculator import Calculator


def test_a_name_is_ours_or_an_import_path_and_none_is_none() -> None:
    assert environment_class(None) is None
    assert environment_class("calculator") is Calculator
    assert environment_class("support.engines.scripted_engine:Counting") is Counting


def test_a_module_in_the_working_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_environment.py").write_text("from support.engines.scripted_engine import Counting as Mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert environment_class("my_environment:Mine") is Counting


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("abacus", ""),
        ("abacus:", ""),
        ("no_such_package.abacus:Abacus", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("support.engines.scripted_engine:Abacus", "AttributeError"),
        ("support.engines.scripted_engine:ScriptedEngine", "subclass"),
        ("support.engines.scripted_engine:LOGPROB", "subclass"),
    ],
)
def test_what_is_no_environment_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(InputError) as caught:
        environment_class(name)
    assert caught.value.key == "environment.name"
    assert caught.value.read.startswith(f'"{name}"')
    assert caught.value.expected
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
