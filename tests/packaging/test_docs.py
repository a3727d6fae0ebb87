"""The reference pages are what the code says, and the examples in docstrings run."""

import doctest
import importlib
import runpy

import pytest
from support.campaigns.campaigns import REPOSITORY

ROOMS = ("configs", "flows", "tasks", "millrace", "storage", "dashboard")
GENERATOR = runpy.run_path(str(REPOSITORY / "docs" / "generate.py"))


@pytest.mark.parametrize("page", GENERATOR["PAGES"])
def test_a_reference_page_is_as_make_docs_writes_it(page: str) -> None:
    stored = (REPOSITORY / "docs" / "reference" / f"{page}.md").read_text()
    assert stored == GENERATOR["PAGES"][page]()


def test_every_reference_page_is_generated() -> None:
    pages = {file.stem for file in (REPOSITORY / "docs" / "reference").iterdir()}
    assert pages == set(GENERATOR["PAGES"])


def modules_with_examples() -> list[str]:
    files = (file for room in ROOMS for file in (REPOSITORY / room).rglob("*.py") if ">>> " in file.read_text())
    return sorted(".".join(file.relative_to(REPOSITORY).with_suffix("").parts) for file in files)


@pytest.mark.parametrize("module", modules_with_examples())
def test_the_examples_in_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
