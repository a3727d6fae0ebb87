"""What the trainer measured, and what evaluations found."""

import numpy as np
from support.pages.run_data import run_data

from dashboard.queries import learning


def test_a_measurement_is_over_policy_versions() -> None:
    line = learning.measured(run_data(), "loss")
    assert line.x.tolist() == [1, 2, 3]
    assert line.y.tolist() == [0.5, 0.25, -0.125]


def test_accuracy_is_over_the_versions_that_were_evaluated() -> None:
    line = learning.accuracy(run_data())
    assert line.x.tolist() == [0, 2]
    assert line.y.tolist() == [0.25, 0.5]
    low, high = learning.accuracy_interval(run_data())
    assert (low.y[0], high.y[0]) == (0.125, 0.5)
    hard = {**run_data().evaluations, "accuracy": np.array([0.0, 0.125])}
    further = learning.further_accuracies(run_data(evaluation_sets={"hard": hard}))
    assert {name: line.y.tolist() for name, line in further.items()} == {"hard": [0.0, 0.125]}
