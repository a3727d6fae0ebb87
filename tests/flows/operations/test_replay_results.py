"""The results of a replay as tables: each number stands under its own name."""

from typing import Any

import pyarrow as pa
import pytest

from flows.operations.replay_results import sections
from millrace.replay.results import COSINE, comparison_schema, summarize_comparison

LOSSES = ("aipo", "reinforce", "ppo_clip", "cispo")
"""An order that Arrow's group_by does not keep."""


@pytest.fixture
def comparison() -> dict[str, Any]:
    """Two steps; a loss's gradient norm is its position, and its cosine to another is 0."""
    rows = [
        {"step": step, "loss": loss, "grad_norm": place, **{f"{COSINE}{other}": other == loss for other in LOSSES}}
        for step in (1, 2)
        for place, loss in enumerate(LOSSES)
    ]
    return summarize_comparison(pa.Table.from_pylist(rows, schema=comparison_schema(LOSSES)))


def test_means_are_in_the_order_of_the_losses(comparison: dict[str, Any]) -> None:
    assert [(mean["loss"], mean["grad_norm"]) for mean in comparison["means"]] == [
        (loss, place) for place, loss in enumerate(LOSSES)
    ]


def test_each_column_of_a_comparison_has_the_figures_of_its_loss(comparison: dict[str, Any]) -> None:
    (table,) = sections({"comparison": comparison})
    assert tuple(table.header[1:]) == LOSSES
    grad_norms, *cosines = [row[1:] for row in table.rows]
    assert grad_norms == ["0", "1", "2", "3"]
    assert cosines == [["1" if column == row else "0" for column in LOSSES] for row in LOSSES]
