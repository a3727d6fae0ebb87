"""The timeline of a response, as far as its moments were recorded."""

from typing import Any

import numpy as np
import pytest
from support.pages.components import of_class, words
from support.pages.run_data import run_data

from dashboard.pages.timeline import view
from dashboard.queries.timeline import Segment, segments
from dashboard.read.groups import Group, StoredResponse
from dashboard.read.model import Columns, RunData

BEGUN = 1000.0


def rows(*values: tuple[float, int, float]) -> Columns:
    """A metric: when it was measured, at which version, and its value."""
    t, versions, measured = (np.array(column) for column in zip(*values, strict=True))
    return {"t": BEGUN + t, "incarnation": np.zeros(len(t), np.int32), "policy_version": versions, "value": measured}


def response(
    row_id: int = 0, *, admitted: float = 0.0, outcome: str | None = "trained", **changes: Any
) -> StoredResponse:
    trajectory = {
        "incarnation": 0,
        "t_admitted": BEGUN + admitted,
        "t_started": BEGUN + admitted + 1.0,
        "t_finished": BEGUN + 5.0,
        "span_versions": [3, 4],
        "t_environment": [],
        **changes,
    }
    taken = {"t": BEGUN + 9.0, "policy_version": 7, "outcome": outcome, "incarnation": 0}
    score = {"seconds": 0.25, "t_scored": BEGUN + 6.0}
    return StoredResponse(
        row_id=row_id,
        trajectory=trajectory,
        score=score,
        consumed=None if outcome is None else taken,
        trainer_logprobs=None,
    )


def group(*responses: StoredResponse) -> Group:
    return Group(generator=1, group_id=2, responses=responses, problems=())


def of(*responses: StoredResponse, run: RunData, notes: dict[str, None] | None = None) -> dict[int, list[Segment]]:
    return segments(run, group(*responses), {} if notes is None else notes)


RECORDED = run_data(
    metrics={
        "generate-1": {"pause_seconds": rows((-2.0, 3, 0.1), (2.5, 4, 0.1), (8.0, 5, 0.1))},
        "generate-0": {"pause_seconds": rows((2.0, 4, 0.1))},
        "train-0": {"train_seconds": rows((5.0, 6, 3.0), (9.0, 7, 1.5))},
    }
)


def told(result: dict[int, list[Segment]], row_id: int = 0) -> list[tuple[str, float, float]]:
    return [(row.label, pytest.approx(row.start - BEGUN), pytest.approx(row.end - BEGUN)) for row in result[row_id]]


def test_each_moment_that_is_recorded_ends_a_segment() -> None:
    result = of(response(), response(1, admitted=0.5), run=RECORDED)
    times = [(start, end) for _, start, end in told(result)]
    assert times == [(0.0, 1.0), (1.0, 2.5), (2.5, 5.0), (5.0, 5.75), (5.75, 6.0), (6.0, 7.5), (7.5, 9.0)]
    assert told(result, 1)[0][1:] == (0.5, 1.5)
    (section,) = view(RECORDED, group(response(), response(1, admitted=0.5)))
    assert "over 9 s" in words(section)
    assert [bar.style["left"] for bar in of_class(section, "trained")[1:]] == ["83.333%"] * 2


def test_what_an_older_run_did_not_record_is_noted_and_the_rest_is_shown() -> None:
    notes: dict[str, None] = {}
    result = of(response(), run=run_data(metrics={}), notes=notes)
    assert [(start, end) for _, start, end in told(result)] == [
        (0.0, 1.0), (1.0, 5.0), (5.0, 5.75), (5.75, 6.0), (6.0, 9.0),
    ]  # fmt: skip
    assert len(notes) == 2


def test_each_answer_of_its_environment_is_a_segment_of_its_own() -> None:
    begun, ended = BEGUN + 2.0, BEGUN + 2.25
    result = of(response(t_environment=[begun, ended, begun + 2.0, ended + 2.0]), run=RECORDED)
    answers = [(segment.start - BEGUN, segment.end - BEGUN) for segment in result[0] if segment.kind == "environment"]
    assert answers == [(2.0, 2.25), (4.0, 4.25)]


def test_a_dropped_response_is_not_trained_and_a_waiting_one_ends_early() -> None:
    result = of(response(0, outcome="stale"), response(1, outcome=None), run=RECORDED)
    assert told(result, 0)[-1][1:] == (6.0, 9.0)
    assert told(result, 1)[-1][1:] == (5.75, 6.0)


def test_a_response_that_cannot_be_read_has_no_row() -> None:
    lost = StoredResponse(row_id=5, trajectory=None, score=None, consumed=None, trainer_logprobs=None)
    assert view(RECORDED, group(lost)) == []
    assert list(of(response(), lost, run=RECORDED)) == [0]
