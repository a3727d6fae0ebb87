"""A comparison of runs: where their configs differ, their results, their lines in one chart."""

from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from support.stored_run.run import Shape, StoredRun, make_run
from support.stores.dict_store import DictStore

from dashboard.read.model import RunData
from dashboard.read.run_reader import RunReader
from dashboard.views.blocks import MINUTES, Chart, Rows
from dashboard.views.colours import SEQUENCE
from dashboard.views.comparison import COMPARISON
from dashboard.views.display import Display, displayed


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
    (attempt,) = run.info.attempts
    info = replace(run.info, attempts=(replace(attempt, config={**attempt.config, **config}),))
    return replace(run, metrics=metrics, info=info)


def table(name: str, *runs: RunData) -> dict[str, list[str]]:
    """The cells of a table's rows by their first."""
    built = next(block for block in COMPARISON.blocks if block.id == name).build(runs)
    assert isinstance(built, Rows)
    return {first: list(cells) for first, *cells in built.rows}


def test_only_settings_that_differ_are_told_with_a_dash_where_a_run_has_none() -> None:
    runs = [run_of([0.0]), run_of([0.0], name="other", extra={"one": 1})]
    assert table("compare-config", *runs) == {"extra.one": ["–", "1"]}
    assert table("compare-incidental", *runs) == {"name": ["tiny-cpu", "other"]}
    assert table("compare-config", runs[0]) == table("compare-config", runs[0], runs[0]) == {}


def test_final_and_best_figures_are_told_with_their_versions() -> None:
    values = table("compare-figures", run_of([0.0] * 20 + [1.0] * 10 + [0.5] * 20))
    assert values["reward, best mean of 10 steps"] == ["1.000 (v30)"]
    (newest,) = values["held-out accuracy, newest"]
    assert newest == "0.250 [0.200, 0.300] (v8)"
    assert values["held-out accuracy, best"] == ["0.500 [0.450, 0.550] (v4)"]
    assert values["policy version"] == ["8/12"]
    young = table("compare-figures", replace(run_of([]), status=None, metrics={}))
    assert young["reward, best mean of 10 steps"] == young["policy version"] == ["–"]


def test_a_run_without_a_figure_is_not_compared_and_the_best_of_the_others_has_a_star() -> None:
    runs = run_of([0.5] * 20), run_of([]), run_of([1.0] * 20)
    values = table("compare-figures", *runs)
    assert values["reward, mean of the last 10 steps"] == ["0.500", "–", "1.000, +0.500 ★"]


def test_a_best_figure_within_noise_or_of_another_task_has_no_star() -> None:
    low, high = run_of([0.0, 0.8] * 10), run_of([0.2, 0.8] * 10)
    assert table("compare-figures", low, high)["reward, mean of the last 10 steps"] == ["0.400", "0.500, +0.100"]
    other = run_of([1.0] * 20, prompts={**high.info.config["prompts"], "source": "other.jsonl"})
    assert table("compare-figures", high, other)["reward, mean of the last 10 steps"] == ["0.500", "1.000"]


def test_the_time_between_two_attempts_is_no_time_of_training() -> None:
    run = run_of([0.5] * 8)
    later = replace(run.info.attempts[0], number=1, t_started=3604.0)
    times = np.array([1.0, 2.0, 3.0, 4.0, 3605.0, 3606.0, 3607.0, 3608.0])
    info = replace(run.info, attempts=(replace(run.info.attempts[0], t_started=0.0), later))
    rows = {**run.metrics["train-0"]["reward_mean"], "t": times}
    run = replace(run, info=info, metrics={"train-0": {"reward_mean": rows}})
    assert table("compare-figures", run)["minutes of training"] == ["0.1"]
    chart = next(block for block in COMPARISON.blocks if block.id == "compare-progress").build([run])
    assert isinstance(chart, go.Figure)
    assert np.flatnonzero(np.isnan(chart.data[0].y)).tolist() == [4]
    reward = next(block for block in COMPARISON.blocks if block.id == "compare-reward-mean").build([run])
    assert isinstance(reward, go.Figure)
    by_time = displayed(reward, Display(smoothing=10, by_time=True), [run])
    assert all(np.isnan(trace.y).tolist().count(True) == 1 for trace in by_time.data)


@pytest.mark.parametrize(("steps", "versions"), [(8, 1), (2000, 50)])
def test_lines_are_smoothed_over_a_fortieth_of_the_longest_run(steps: int, versions: int) -> None:
    runs = [run_of([0.5] * steps), run_of([0.5] * 2)]
    figure = next(block for block in COMPARISON.blocks if block.id == "compare-reward-mean").build(runs)
    assert isinstance(figure, go.Figure)
    title = figure.layout.xaxis.title.text
    assert (f"of {versions} versions" in title) == (versions > 1)
    assert "quartiles" not in title, "seeds of one another have only the band of their mean"
    line = next(trace for trace in figure.data if trace.name)
    assert len(line.x) == min(steps, 150)
    assert {value for trace in figure.data for value in trace.y} == {0.5}


def test_runs_that_differ_in_their_seed_have_a_mean_with_a_band_from_lowest_to_highest() -> None:
    def run(rewards: list[float], run_id: str, **config: Any) -> RunData:
        made = run_of(rewards, **config)
        return replace(made, info=replace(made.info, run_id=run_id))

    seeds = [run([0.2] * 8, "a", seed=1), run([0.6] * 6, "b", seed=2)]
    others = [run([0.9] * 8, "c", training={"learning_rate": 1.0}), run([], "d", extra={"one": 1})]
    chart = next(block for block in COMPARISON.blocks if block.id == "compare-reward-mean")
    figure = displayed(chart.build([*seeds, *others]), Display(smoothing=1, by_time=True), [*seeds, *others])
    named = {trace.name: trace for trace in figure.data if trace.name}
    assert set(named) == {"a", "b", "c", "a, mean of 2 runs"}
    assert [named[name].line.dash for name in ("a", "b", "c")] == ["dot", "dot", "solid"]
    mean = named["a, mean of 2 runs"]
    assert len(mean.x) == 6
    assert mean.y == pytest.approx([0.4] * 6)
    (band,) = [trace for trace in figure.data if trace.legendgroup == mean.name and trace.fill]
    assert {round(value, 6) for value in band.y} == {0.2, 0.6}


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
    values = table("compare-figures", *runs)
    first, second = values["reward, mean of the last 10 steps"]
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


@pytest.mark.parametrize("by_time", [False, True])
def test_a_line_is_hidden_with_its_band_and_has_the_colour_of_its_run(runs: list[RunData], by_time: bool) -> None:
    display = Display(smoothing=1, by_time=by_time)
    charts = [displayed(block.build(runs), display, runs) for block in COMPARISON.blocks if isinstance(block, Chart)]
    assert by_time == all(figure.layout.xaxis.title.text.startswith(MINUTES) for figure in charts)
    assert charts
    for figure in charts:
        for number, run in enumerate(runs):
            run_traces = [trace for trace in figure.data if trace.legendgroup == run.info.run_id]
            assert [trace.showlegend for trace in run_traces].count(None) == 1
            assert {trace.fillcolor or trace.line.color for trace in run_traces} == {SEQUENCE[number]}
