"""The groups that a person wants to read first."""

import numpy as np
from support.pages.consumed_rows import consumed_rows
from support.pages.run_data import run_data

from dashboard.queries.notable_groups import notable_groups

REWARDS = [
    [9.0, 9.0],  # Of version 1: too old to be shown.
    [1.0, 0.5],
    [0.0, 0.0],
    [1.0, 0.5],
    [None, 0.25],
    [None, None],
]


def test_the_newest_best_worst_and_spreadless_groups_are_notable() -> None:
    groups = len(REWARDS)
    consumed = consumed_rows(
        np.repeat([1, 30, 31, 32, 33, 34], 2),
        reward=np.array(REWARDS, np.float64).ravel(),
        sample_index=np.tile([0, 1], groups),
        group_id=np.repeat(np.arange(groups), 2),
        generator=np.repeat(np.arange(groups) % 2, 2),
        trajectory_row_id=np.arange(2 * groups),
    )
    found = {one.why: one for one in notable_groups(run_data(consumed=consumed))}
    assert {why: one.group_id for why, one in found.items()} == {"best": 3, "worst": 2, "no spread": 2}
    best = found["best"]
    assert (best.generator, best.row_id, best.policy_version, best.reward) == (1, 6, 32, 0.75)
