"""A comparison of runs: where their configs differ, their results, their lines in one chart."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.stored_run.run import Shape, StoredRun, make_run
from support.stores.dict_store import DictStore

from dashboard.queries.runs.comparison import differences, figures, smoothed, window
from dashboard.read.model import RunData
from dashboard.read.run_reader import RunReader
from dashboard.views.blocks import Chart, Rows, View
from dashboard.views.colours import SEQUENCE
from dashboard.views.comparison.pages import COMPARISON, COMPARISON_BY_TIME


def run_of(rewards: list[float], **config: Any) -> RunData:
    """A run with these rewards, a second a step."""
    store = DictStore()
    stored = StoredRun(store, "one", Shape(steps=12))
    stored.append(4)
    stored.evaluate(0.5)
    stored.append(4)
    stored.evaluate(0.25)
    stored.finish()
    run = RunReader(store).look()
    versions = np.arange(1.0, len(rewards) + 1)
    columns = {"t": versions, "incarnation": 0 * versions, "policy_version": versions, "value": np.array(rewards)}
    metrics = {"train-0": {**run.metrics["train-0"], "reward_mean": columns}}
    return replace(run, metrics=metrics, info=replace(run.info, config={**run.info.config, **config}))


def test_only_settings_that_differ_are_told_with_a_dash_where_a_run_has_none() -> None:
    runs = [run_of([0.0]), run_of([0.0], name="other", extra={"one": 1})]
    assert differences(runs) == [("extra.one", ["–", "1"]), ("name", ["tiny-cpu", "other"])]
    assert differences(runs[:1]) == differences([runs[0], runs[0]]) == []


def test_final_and_best_figures_are_told_with_their_versions() -> None:
    rewards = [0.0] * 20 + [1.0] * 10 + [0.5] * 20
    values = figures(run_of(rewards))
    assert values["reward, best mean of 10 steps"] == "1.000 (v30)"
    assert values["held-out accuracy, newest"].startswith("0.250 ±0.")
    assert values["held-out accuracy, newest"].endswith(" (v8)")
    assert values["held-out accuracy, best"] == "0.500 (v4)"
    assert values["policy version"] == "8/12"
    young = replace(run_of([]), status=None, metrics={})
    assert figures(young)["reward, best mean of 10 steps"] == figures(young)["policy version"] == "–"


@pytest.mark.parametrize(("steps", "versions"), [(8, 1), (2000, 50)])
def test_lines_are_smoothed_over_a_fortieth_of_the_longest_run(steps: int, versions: int) -> None:
    runs = [run_of([0.5] * steps), run_of([0.5] * 2)]
    assert window(runs) == versions
    mean, low, high = smoothed(runs[0], "reward_mean", versions)
    assert len(mean.x) == min(steps, 150)
    assert set(mean.y) == set(low.y) == set(high.y) == {0.5}


@pytest.fixture(scope="module")
def runs() -> list[RunData]:
    result = []
    for number in range(2):
        run = make_run(
            DictStore(), f"run-{number}", Shape(steps=100, seed=number, max_staleness=2 + number, steps_per_part=20)
        )
        run.evaluate(0.5)
        result.append(RunReader(run.store).look())
    return result


def test_the_differences_come_first_and_have_a_column_for_each_run(runs: list[RunData]) -> None:
    rows = COMPARISON.blocks[0].build(runs)
    assert isinstance(rows, Rows)
    assert rows.header[1:] == ["run-0", "run-1"]
    assert rows.rows == [["staleness.max_staleness", "2", "3"]]


def test_each_figure_tells_its_difference_to_the_first_run_and_the_best(runs: list[RunData]) -> None:
    table = next(block for block in COMPARISON.blocks if block.id == "compare-figures").build(runs)
    assert isinstance(table, Rows)
    values = {name: cells for name, *cells in table.rows}
    first, second = values["reward, mean of the last 20 steps"]
    assert sum("★" in cell for cell in (first, second)) == 1
    assert float(second.split(", ")[1].split()[0]) == pytest.approx(
        float(second.split(",")[0]) - float(first.split()[0]), abs=2e-3
    )
    assert values["state"] == ["running", "running"] or len(set(values["state"])) == 1


def test_names_that_differ_are_folded_apart_and_models_are_not() -> None:
    runs = [run_of([0.0], model={"path": "a"}), run_of([0.0], name="other", model={"path": "b"})]
    shown, folded = (block.build(runs) for block in (COMPARISON.blocks[0], COMPARISON.blocks[-1]))
    assert isinstance(shown, Rows) and isinstance(folded, Rows)
    assert [row[0] for row in shown.rows] == ["model.path"]
    assert [row[0] for row in folded.rows] == ["name"]


@pytest.mark.parametrize("view", [COMPARISON, COMPARISON_BY_TIME], ids=lambda view: view.name)
def test_a_line_is_hidden_with_its_band_and_has_the_colour_of_its_run(runs: list[RunData], view: View) -> None:
    charts = [block.build(runs) for block in view.blocks if isinstance(block, Chart)]
    assert charts
    for figure in charts:
        for number, run in enumerate(runs):
            run_traces = [trace for trace in figure.data if trace.legendgroup == run.info.run_id]
            assert [trace.showlegend for trace in run_traces].count(None) == 1
            assert {trace.fillcolor or trace.line.color for trace in run_traces} == {SEQUENCE[number]}
