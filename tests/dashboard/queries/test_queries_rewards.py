"""What responses earn and how long they are, by the policy version that was trained on them."""

import numpy as np
import pytest
from support.pages.consumed_rows import consumed_rows
from support.pages.run_data import measured, run_data

from dashboard.queries import rewards
from dashboard.read.model import RunData


def two_groups(**columns: object) -> RunData:
    """Version 1 took a group of four and one of two; version 3 a group whose rewards are all equal."""
    values = {
        "sample_index": [0, 1, 2, 3, 0, 1, 0, 1],
        "reward": [0.0, 1.0, 0.0, 1.0, 2.0, 0.0, 0.1, 0.1],
        **columns,
    }
    return run_data(consumed=consumed_rows([1] * 6 + [3, 3], **values))  # type: ignore[arg-type]


def test_the_spread_is_that_of_the_rewards_within_each_group() -> None:
    found = rewards.reward_spread(two_groups())
    assert found["mean"].x.tolist() == [1, 3]
    assert found["mean"].y == pytest.approx([0.75, 0.0])
    assert {name: line.y.tolist() for name, line in found.items() if name != "mean"} == {
        "p10": [0.5, 0.0], "p50": [0.5, 0.0], "p90": [1.0, 0.0]
    }  # fmt: skip


def test_a_failed_reward_does_not_count_and_one_reward_has_no_spread() -> None:
    unknown = [np.nan, 1.0, np.nan, 0.0, 2.0, np.nan, 0.1, 0.1]
    found = rewards.reward_spread(two_groups(reward=unknown))
    assert found["p90"].y.tolist() == [0.5, 0.0]


def test_lengths_are_quantiles_over_all_responses_of_a_version() -> None:
    run = run_data(consumed=consumed_rows([1] * 100 + [2], tokens=[*range(100, 0, -1), 7]))
    found = rewards.lengths(run)
    assert {name: line.y.tolist() for name, line in found.items()} == {
        "p10": [10, 7], "p50": [50, 7], "p90": [90, 7], "p99": [99, 7], "max": [100, 7]
    }  # fmt: skip


def test_components_are_those_that_the_trainer_measured() -> None:
    metrics = {
        "train-0": {
            "reward_component/b": measured([1.0]),
            "reward_component/a": measured([0.5]),
            "loss": measured([2.0]),
        }
    }
    found = rewards.components(run_data(metrics=metrics))
    assert [(name, line.y.tolist()) for name, line in found.items()] == [("a", [0.5]), ("b", [1.0])]
    assert len(rewards.truncated_share(run_data(metrics=metrics)).x) == 0
