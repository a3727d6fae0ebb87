"""The reference pages are what the code says."""

import runpy

import pytest
from support.campaigns.campaigns import REPOSITORY

GENERATOR = runpy.run_path(str(REPOSITORY / "docs" / "generate.py"))


@pytest.mark.parametrize("page", GENERATOR["PAGES"])
def test_a_reference_page_is_as_make_docs_writes_it(page: str) -> None:
    stored = (REPOSITORY / "docs" / "reference" / f"{page}.md").read_text()
    assert stored == GENERATOR["PAGES"][page]()


def test_every_reference_page_is_generated() -> None:
    pages = {file.stem for file in (REPOSITORY / "docs" / "reference").iterdir()}
    assert pages == set(GENERATOR["PAGES"])
