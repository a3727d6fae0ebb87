"""Flow, from what stages measured of their time, their tokens and their weights."""

from typing import Any

import numpy as np
import pytest
from support.pages.run_data import attempt, run_data

from dashboard.queries import flow
from dashboard.queries.series import averaged
from dashboard.read.model import Columns, RunData, RunInfo
from dashboard.views.blocks import Rows
from dashboard.views.flow import VIEW

_START = 1000.0
_WAIT = "waiting for scored groups"


def _rows(points: dict[float, float], versions: list[int] | None = None) -> Columns:
    """Seconds since the run was started → value."""
    return {
        "t": _START + np.array(list(points), np.float64),
        "incarnation": np.zeros(len(points), np.int32),
        "policy_version": np.array(versions or [0] * len(points)),
        "value": np.array(list(points.values()), np.float64),
    }


def _run(metrics: dict[str, dict[str, Columns]], transports: dict[float, str] | None = None, **more: Any) -> RunData:
    attempts = tuple(
        attempt({"weights": {"transport": transport}}, number=number, t_started=_START + t)
        for number, (t, transport) in enumerate((transports or {0.0: "shm"}).items())
    )
    info = RunInfo(run_id="r", url="u", attempts=attempts)
    return run_data(info=info, metrics=metrics, **more)


def _time(**kinds: dict[float, float]) -> dict[str, Columns]:
    return {f"time/{_WAIT if kind == 'wait' else kind}/seconds": _rows(points) for kind, points in kinds.items()}


def test_a_track_is_cut_into_the_shares_of_each_bin() -> None:
    # At 2 s: one second each. At 4 s: all train.
    run = _run({"train-0": _time(wait={2: 1.0}, train={2: 1.0, 4: 2.0})})
    (track,) = flow.time_by_replica(run)
    assert track.name == "train-0"
    assert (track.edges * 60).tolist() == [0, 2, 4]
    assert {kind: shares.tolist() for kind, shares in track.shares.items()} == {"train": [0.5, 1.0], _WAIT: [0.5, 0.0]}


def test_tracks_have_150_intervals_at_most_whose_width_doubles() -> None:
    times = {float(t): 2.0 for t in range(2, 1202, 2)}
    (track,) = flow.time_by_replica(_run({"train-0": _time(train=times)}))
    # 1200 s in bins of 8 s; of 4 s they would be 300.
    assert len(track.edges) == 151
    assert np.allclose(track.shares["train"], 1.0)


def test_the_idle_fraction_is_of_the_time_measured_in_all_replicas() -> None:
    run = _run(
        {
            "generate-0": _time(generate={2: 2.0, 4: 2.0}),
            "generate-1": _time(generate={2: 1.0}, wait={2: 1.0}),
        }
    )
    line = flow.idle(run)["generate"]
    assert (line.x * 60).tolist() == [1, 3]
    assert line.y.tolist() == [0.25, 0.0]


def test_throughput_is_summed_over_replicas_and_ends_where_one_has_not_measured_yet() -> None:
    run = _run(
        {
            "generate-0": {"total/tokens": _rows({2: 100.0, 4: 300.0, 6: 300.0})},
            "generate-1": {"total/tokens": _rows({2: 0.0, 4: 50.0})},
            "score-0": {"total/tokens": _rows({3: 10.0, 6: 10.0})},
        }
    )
    throughput = flow.throughput(run)
    assert list(throughput) == ["generate", "score"]
    np.testing.assert_array_equal(throughput["generate"].y, [50.0, 125.0, np.nan])
    # The tokens of the first row came in the two seconds before it.
    assert throughput["score"].y.tolist() == [2.5, 2.5, 0.0]


def test_stage_times_are_the_mean_of_the_replicas() -> None:
    statuses = {
        "generate-0": {"seconds": {"generate": 6.0, "commit": 1.0, "idle": 3.0}},
        "generate-1": {"seconds": {"generate": 9.0, "idle": 1.0}},
        "train-0": {"seconds": {"train": 4.0, "idle": 6.0}},
        "evaluate-0": {"seconds": {"evaluate": 99.0}},
    }
    times = flow.stage_times(_run({}, stage_status=statuses))
    assert [(time.stage, time.replicas, time.busy, time.idle) for time in times] == [
        ("generate", 2, 8.0, 2.0),
        ("train", 1, 4.0, 6.0),
    ]


def test_overlap_is_measured_against_perfect_overlap() -> None:
    statuses = {
        "generate-0": {"seconds": {"generate": 8.0, "idle": 2.0}},
        "score-0": {"seconds": {"score": 2.0, "idle": 8.0}},
        "train-0": {"seconds": {"train": 6.0, "idle": 4.0}},
    }
    table = next(block for block in VIEW.blocks if block.id == "flow-overlap").build([_run({}, stage_status=statuses)])
    assert isinstance(table, Rows)
    assert table.rows == [("16.0", "generate", "2.00", "10.0", "1.60", "0.80")]


def test_pushes_are_separated_by_the_transport_of_their_attempt() -> None:
    rows = _rows({1: 0.1, 11: 0.2, 21: 0.3, 31: 0.4}, versions=[0, 1, 2, 3])
    transports = {0.0: "shm", 10.0: "shm", 20.0: "store", 30.0: "shm"}
    run = _run({"sync_weights-0": {"push_seconds": rows}}, transports)
    periods = flow.pushes(run)
    assert list(periods) == ["shm, attempt 0 to 1", "store, attempt 2", "shm, attempt 3"]
    assert [line.x.tolist() for line in periods.values()] == [[0, 1], [2], [3]]
    assert [line.y.tolist() for line in periods.values()] == [[0.1, 0.2], [0.3], [0.4]]
    assert flow.push_seconds(run).y.tolist() == [0.1, 0.2, 0.3, 0.4]


def test_deliveries_are_separated_by_generator_and_route() -> None:
    run = _run(
        {
            "generate-0": {
                "delivery/shm/seconds": _rows({1: 0.2}, [1]),
                "delivery/store/seconds": _rows({2: 4.0}, [2]),
            },
            "generate-1": {"delivery/shm/seconds": _rows({1: 0.4}, [1])},
        }
    )
    deliveries = flow.deliveries(run)
    assert list(deliveries) == ["generate-0 by shm", "generate-0 by store", "generate-1 by shm"]
    assert deliveries["generate-0 by store"].y.tolist() == [4.0]
    mean = averaged([*deliveries.values()])
    assert (mean.x.tolist(), mean.y.tolist()) == ([1, 2], [pytest.approx(0.3), 4.0])
