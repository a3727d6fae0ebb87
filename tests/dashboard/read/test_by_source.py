"""The parts of a run with several sources."""

import numpy as np
from support.pages.run_data import consumed_rows, measured, run_data

from dashboard.read.model import RunData


def test_every_row_belongs_to_one_source(mixture: RunData) -> None:
    assert list(mixture.by_source) == ["math", "words"]
    rows = [part.consumed["trajectory_row_id"] for part in mixture.by_source.values()]
    assert all(map(len, rows))
    assert sum(map(len, rows)) == len(mixture.consumed["trajectory_row_id"])


def test_a_source_has_its_metrics_and_evaluations_under_the_names_of_the_run() -> None:
    results = {"policy_version": np.array([2]), "accuracy": np.array([0.5])}
    run = run_data(
        sources=("math", "words"),
        consumed=consumed_rows([1, 1], source=[0, 1]),
        metrics={"train-0": {"loss": measured([1.0]), "loss/math": measured([2.0]), "loss/words": measured([3.0])}},
        evaluations=results,
        evaluation_sets={"math": {**results, "accuracy": np.array([0.75])}, "math/hard": results},
    )
    math, words = run.by_source.values()
    assert math.metrics["train-0"]["loss"]["value"].tolist() == [2.0]
    assert words.metrics["train-0"]["loss"]["value"].tolist() == [3.0]
    assert math.evaluations["accuracy"].tolist() == [0.75]
    assert list(math.evaluation_sets) == ["hard"]
    assert words.evaluations["accuracy"].tolist() == []


def test_a_run_with_one_source_has_no_parts_even_if_rows_of_it_are_damaged() -> None:
    assert run_data().by_source == {}
    assert run_data(sources=("default", ""), consumed=consumed_rows([1, 1], source=[0, 1])).by_source == {}
