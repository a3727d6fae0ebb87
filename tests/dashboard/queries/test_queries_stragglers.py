"""Stragglers, from the generators' status records and the trainer's metrics."""

from typing import Any

import numpy as np
import pytest
from support.pages.run_data import STATUS, T, generating, measured, run_data

from dashboard.queries.stragglers import InFlight, biased_length, in_flight
from dashboard.read.model import RunData
from millrace.runtime.messages import LOADING, STOPPED

_TRAINER = {"train-0": {"t": T, "doing": "train", "policy_version": 9}}
_ONE = InFlight(
    generator=0,
    requests=12,
    groups=5,
    tokens=700,
    seconds=2.5,
    versions=3,
    loses_tokens=False,
    continued=40,
    discarded=7,
)


def _run(*, state: str = "running", **generators: Any) -> RunData:
    statuses = {name.replace("_", "-"): status for name, status in generators.items()}
    return run_data(status={**STATUS, "state": state}, stage_status={**_TRAINER, **statuses})


def test_what_is_in_flight_is_as_old_as_the_trainer_is_ahead_of_its_oldest_weights() -> None:
    assert in_flight(_run(generate_0=generating())) == [_ONE]


@pytest.mark.parametrize(("oldest", "beyond"), [(5, False), (4, True)])
def test_beyond_the_bound_is_more_than_the_bound(oldest: int, beyond: bool) -> None:
    (work,) = in_flight(_run(generate_0=generating(oldest_version_in_flight=oldest)))
    assert (work.versions, work.loses_tokens) == (9 - oldest, beyond)


@pytest.mark.parametrize(
    "run",
    [
        _run(generate_0=generating(doing=STOPPED, oldest_version_in_flight=0)),
        _run(generate_0=generating(doing=LOADING, oldest_version_in_flight=0)),
        _run(generate_0=generating(oldest_version_in_flight=0), state="stopped"),
    ],
    ids=["drained", "loading its model", "killed with its run"],
)
def test_a_generator_that_is_not_at_work_has_only_what_it_left(run: RunData) -> None:
    (work,) = in_flight(run)
    assert (work.requests, work.groups, work.seconds, work.versions, work.loses_tokens) == (
        None,
        None,
        None,
        None,
        False,
    )
    assert (work.tokens, work.continued, work.discarded) == (700, 40, 7)


def _ratios(**values: list[float]) -> RunData:
    return run_data(metrics={"train-0": {f"{name}_ratio": measured(ratios) for name, ratios in values.items()}})


@pytest.mark.parametrize(("last", "biased"), [(0.969, 0.969), (1.031, 1.031), (0.97, None), (1.03, None)])
def test_the_last_step_says_whether_the_length_is_biased(last: float, biased: float | None) -> None:
    assert biased_length(_ratios(length=[0.5] * 19 + [last], reward=[0.1] * 20)) == biased


def test_the_length_is_not_called_biased_in_the_first_steps_of_a_trainer() -> None:
    assert biased_length(run_data()) is None
    assert biased_length(_ratios(length=[0.5] * 19)) is None
    rows = dict(measured([0.5] * 30))
    restarted = {**rows, "incarnation": np.array([0] * 11 + [1] * 19)}
    assert biased_length(run_data(metrics={"train-0": {"length_ratio": restarted}})) is None
    assert biased_length(run_data(metrics={"train-0": {"length_ratio": rows}})) == 0.5
