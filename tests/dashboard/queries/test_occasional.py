"""When the start model was made and versions were evaluated, from what these stages leave behind."""

from typing import Any

import numpy as np
from support.pages.run_data import T, run_data

from dashboard.queries.occasional import occasional_tracks
from dashboard.read.model import Columns

STARTED = T - 60
NAN = float("nan")


def evaluated(*results: tuple[float, float]) -> Columns:
    """When each ended, seconds after the run's start, and how many it took."""
    t, seconds = np.array(results, np.float64).reshape(-1, 2).T
    unknown = np.full(len(t), NAN)
    return {
        "policy_version": np.arange(len(t)), "accuracy": unknown, "accuracy_low": unknown, "accuracy_high": unknown,
        "num_prompts": np.arange(len(t)), "t": STARTED + t, "seconds": seconds,
    }  # fmt: skip


def tracks(**changes: Any) -> dict[str, list[tuple[float, float, float]]]:
    """(begin, end, share) of each interval, in seconds since the run's start, by track."""
    result = occasional_tracks(run_data(**{"stage_status": {}, "evaluations": evaluated(), **changes}))
    return {
        track.name: [
            (round(float(begin) * 60, 3), round(float(end) * 60, 3), float(share))
            for begin, end, share in zip(track.edges, track.edges[1:], track.shares[track.name], strict=False)
        ]
        for track in result
    }


def test_the_start_model_is_made_from_the_start_of_its_attempt_until_its_last_status() -> None:
    record = {"doing": "stopped", "attempt": 0, "t": STARTED + 8}
    assert tracks(stage_status={"bootstrap-0": record}) == {"bootstrap": [(0.0, 8.0, 1.0)]}
    for older in ({"t": STARTED - 1}, {"t": STARTED + 8, "attempt": 7}, {"doing": "stopped"}):
        assert tracks(stage_status={"bootstrap-0": older}) == {}


def test_an_evaluation_lasts_as_long_as_its_result_says_and_nothing_is_between_two() -> None:
    result = tracks(evaluations=evaluated((5, 4), (20, 10)))
    assert result == {"evaluate": [(1.0, 5.0, 1.0), (5.0, 10.0, 0.0), (10.0, 20.0, 1.0)]}
