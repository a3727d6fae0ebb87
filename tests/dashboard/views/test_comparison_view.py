"""The first pages of a comparison: a table of differences, a legend that hides a line with its band, colours apart."""

import itertools

import numpy as np
import pytest
from support.stores.dict_store import DictStore

from benchmarks.stored_run.run import Shape, make_run
from dashboard.read.model import RunData
from dashboard.read.run_reader import RunReader
from dashboard.views.blocks import Chart, Rows
from dashboard.views.colours import SEQUENCE
from dashboard.views.comparison.pages import COMPARISON, COMPARISON_BY_TIME

CONES = {
    "all": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
"""What readers who lack one kind of cones see of linear sRGB (Machado, Oliveira and Fernandes 2009)."""


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


def linear(colours: tuple[str, ...]) -> np.ndarray:
    values = np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in colours])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = rgb @ to_xyz.T / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)


@pytest.mark.parametrize("cones", CONES)
def test_the_colours_of_eight_runs_are_told_apart(cones: str) -> None:
    assert len(SEQUENCE) == 8
    seen = lab(np.clip(linear(SEQUENCE) @ np.array(CONES[cones]).T, 0, 1))
    apart = [float(np.linalg.norm(one - other)) for one, other in itertools.combinations(seen, 2)]
    assert min(apart) >= 10


def test_the_differences_come_first_and_have_a_column_for_each_run(runs: list[RunData]) -> None:
    block = COMPARISON.blocks[0]
    rows = block.build(runs)
    assert isinstance(rows, Rows)
    assert rows.header == ["setting", "run-0", "run-1"]
    assert rows.rows == [["staleness.max_staleness", "2", "3"]]
    same = block.build([runs[0], runs[0]])
    assert isinstance(same, Rows)
    assert same.note == "All settings are the same."


@pytest.mark.parametrize("view", [COMPARISON, COMPARISON_BY_TIME], ids=lambda view: view.name)
def test_a_line_is_hidden_with_its_band_and_has_the_colour_of_its_run(runs: list[RunData], view: object) -> None:
    charts = {block.id: block.build(runs) for block in view.blocks if isinstance(block, Chart)}  # type: ignore[attr-defined]
    assert charts
    for figure in charts.values():
        for number, run in enumerate(runs):
            own = [trace for trace in figure.data if trace.legendgroup == run.info.run_id]
            assert [trace.showlegend for trace in own].count(None) == 1
            assert {trace.fillcolor or trace.line.color for trace in own} == {SEQUENCE[number]}
    reward = next(figure for name, figure in charts.items() if name.endswith("reward-mean"))
    assert [trace.fill for trace in reward.data] == ["toself", "toself", None, None]
    assert "mean of 2 versions" in reward.layout.xaxis.title.text
    assert ("minutes" in reward.layout.xaxis.title.text) == (view is COMPARISON_BY_TIME)
