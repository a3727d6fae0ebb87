"""The house: no module is loose, no room is crowded, and rooms know only what they may."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCTION = ("configs", "flows", "tasks", "millrace", "storage", "dashboard", "benchmarks")
MOST_MODULES = 15
LOOSE = {"__init__.py", "types.py", "errors.py"}


def modules(*folders: str) -> list[Path]:
    return sorted(file.relative_to(ROOT) for folder in folders for file in (ROOT / folder).rglob("*.py"))


def test_nothing_is_loose_at_the_top_of_millrace_but_types_and_errors() -> None:
    assert {file.name for file in (ROOT / "millrace").glob("*.py")} == LOOSE


def test_no_room_has_more_than_fifteen_modules() -> None:
    rooms = Counter(file.parent for file in modules(*PRODUCTION, "tests") if file.name != "__init__.py")
    assert {str(room): count for room, count in rooms.items() if count > MOST_MODULES} == {}


@pytest.mark.parametrize("room", sorted({str(file.parent) for file in modules(*PRODUCTION)}))
def test_a_room_of_production_code_is_a_package(room: str) -> None:
    assert (ROOT / room / "__init__.py").exists()


def test_a_package_imports_nothing_by_itself() -> None:
    importing = [
        str(file)
        for file in modules(*PRODUCTION)
        if file.name == "__init__.py"
        if any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse((ROOT / file).read_text()).body)
    ]
    assert importing == []


def test_only_stages_planner_devices_and_attempt_reader_know_the_whole_config() -> None:
    knowing = [
        str(file)
        for file in modules("millrace")
        if any(
            isinstance(node, ast.ImportFrom) and node.module == "configs.schema" and node.names[0].name == "RunConfig"
            for node in ast.walk(ast.parse((ROOT / file).read_text()))
        )
    ]
    assert [file for file in knowing if not file.startswith(("millrace/stages/", "millrace/planning/"))] == [
        "millrace/runtime/arguments.py",
        "millrace/runtime/devices.py",
        "millrace/runtime/entry.py",
        "millrace/runtime/stage.py",
    ]


@pytest.mark.slow
def test_no_two_test_files_share_a_name() -> None:
    names = Counter(file.name for file in modules("tests") if file.name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []
