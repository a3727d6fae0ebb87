"""Several ranks read their slices of a model folder: the same bits as from the whole, without ever holding it.

The compared values were computed by torchrun's processes: see `support.training.sharded_loading`.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.training.sharded_loading import CASES, SPOILT, launch, write_folders, write_large
from support.training.sharded_trainers import LAYOUTS, Layout

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent of all cases' model folders."""
    parent = tmp_path_factory.mktemp("models")
    write_folders(parent)
    return parent


@pytest.fixture(scope="module")
def report_of(folders: Path) -> Callable[[int], dict[str, Any]]:
    """`report_of(2)`: of two ranks."""

    @functools.cache
    def report(ranks: int) -> dict[str, Any]:
        launch(ranks, str(folders / f"{ranks}.json"))
        result: dict[str, Any] = json.loads((folders / f"{ranks}.json").read_text())
        return result

    return report


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, id=f"{name} {layout}", marks=pytest.mark.extended if ranks > 2 else ())
        for ranks, layouts in LAYOUTS.items()
        for layout in layouts
        for name, case in CASES.items()
        if case.runs_on(layout)
    ],
)
def test_ranks_that_read_slices_have_the_bits_of_ranks_that_loaded_all(
    report_of: Callable[[int], dict[str, Any]], name: str, layout: Layout
) -> None:
    this = report_of(layout.data * layout.tensor)[f"{name} {layout}"]
    assert this["apart"] == []
    whole, sliced = this["losses"]
    assert sliced == whole
    assert len(set(whole)) == 2


@pytest.mark.parametrize("name", SPOILT)
def test_what_one_rank_refuses_is_refused_by_all(report_of: Callable[[int], dict[str, Any]], name: str) -> None:
    first, second = report_of(2)[name]
    assert first == second
    assert first.startswith("ModelFolderError")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_a_rank_reads_and_holds_no_more_than_its_shard(folders: Path, ranks: int) -> None:
    write_large(folders / "large")
    launch(ranks, str(folders / "measured.json"), str(folders / "large"))
    for rank in json.loads((folders / "measured.json").read_text())["measured"]:
        assert rank["shard"] > 350 * MIB / ranks
        # Headers too, and files of imports.
        assert rank["shard"] <= rank["read"] < rank["shard"] + MIB
        # A part of the largest tensor, which has 25 MB, and the module tree.
        assert rank["held"] < rank["shard"] + 32 * MIB
