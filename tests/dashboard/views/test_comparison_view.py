"""The first pages of a comparison: a table of differences, a legend that hides a line with its band."""

import pytest
from support.stored_run.run import Shape, make_run
from support.stores.dict_store import DictStore

from dashboard.read.model import RunData
from dashboard.read.run_reader import RunReader
from dashboard.views.blocks import Chart, Rows, View
from dashboard.views.colours import SEQUENCE
from dashboard.views.comparison.pages import COMPARISON, COMPARISON_BY_TIME


@pytest.fixture(scope="module")
def runs() -> list[RunData]:
    found = []
    for number in range(2):
        run = make_run(
            DictStore(), f"run-{number}", Shape(steps=100, seed=number, max_staleness=2 + number, steps_per_part=20)
        )
        run.evaluate(0.5)
        found.append(RunReader(run.store).look())
    return found


def test_the_differences_come_first_and_have_a_column_for_each_run(runs: list[RunData]) -> None:
    rows = COMPARISON.blocks[0].build(runs)
    assert isinstance(rows, Rows)
    assert rows.header[1:] == ["run-0", "run-1"]
    assert rows.rows == [["staleness.max_staleness", "2", "3"]]


@pytest.mark.parametrize("view", [COMPARISON, COMPARISON_BY_TIME], ids=lambda view: view.name)
def test_a_line_is_hidden_with_its_band_and_has_the_colour_of_its_run(runs: list[RunData], view: View) -> None:
    charts = [block.build(runs) for block in view.blocks if isinstance(block, Chart)]
    assert charts
    for figure in charts:
        for number, run in enumerate(runs):
            own = [trace for trace in figure.data if trace.legendgroup == run.info.run_id]
            assert [trace.showlegend for trace in own].count(None) == 1
            assert {trace.fillcolor or trace.line.color for trace in own} == {SEQUENCE[number]}
