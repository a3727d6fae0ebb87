"""Measurements of a run against the predictions of its plan."""

import json
from typing import Any

import pytest
from support.stored_run.run import Shape, make_run
from support.stores.dict_store import DictStore

from millrace.rollouts.ledger import Account, Amount
from millrace.runs.figures import measured_against_plan
from millrace.runs.status import StatusReader
from storage import layout

PLAN = {"step_seconds": 2.0, "tokens_per_second": 50.0, "staleness_mean": 0.5, "dropped_share": 0.25}


def compare(plan: dict[str, float | None], trainer: dict[str, Any], account: Account) -> dict[str, dict[str, Any]]:
    figures = measured_against_plan({"plan": plan}, trainer, account, staleness_mean=1.0)
    return {figure.name: figure.to_json() for figure in figures}


def test_every_figure_of_the_plan_is_compared_with_its_measurement() -> None:
    account = Account(trained=Amount(rollouts=80), dropped={"stale": Amount(rollouts=20)})
    figures = compare(PLAN, {"step_seconds": 3.0, "tokens_per_second": 40.0}, account)
    assert {name: (figure["measured"], figure["ratio"]) for name, figure in figures.items()} == {
        "step_seconds": (3.0, 1.5),
        "tokens_per_second": (40.0, 0.8),
        "staleness_mean": (1.0, 2.0),
        "dropped_share": (pytest.approx(0.2), pytest.approx(0.8)),
    }


def test_rolled_back_trajectories_do_not_count_as_dropped() -> None:
    account = Account(trained=Amount(rollouts=80), dropped={"rolled_back": Amount(rollouts=900)})
    assert compare(PLAN, {}, account)["dropped_share"]["measured"] == 0


def test_figures_without_a_measurement_have_no_ratio() -> None:
    assert compare({"step_seconds": 2.0, "staleness_mean": None}, {}, Account()) == {
        "step_seconds": {"planned": 2.0, "measured": None, "ratio": None}
    }


def test_the_status_of_a_run_compares_its_plan_if_it_has_one() -> None:
    store = DictStore()
    run = make_run(store, "small", Shape(steps=4))
    assert StatusReader(store).look()["plan"] == {}
    record = json.loads(bytes(store.get(layout.RUN)))
    record["config"]["plan"] = PLAN
    store.put(layout.RUN, json.dumps(record).encode())
    status = StatusReader(run.store).look()
    assert status["plan"]["step_seconds"] == {"planned": 2.0, "measured": 1.0, "ratio": 0.5}
    assert status["plan"]["staleness_mean"]["measured"] == status["staleness"]["mean"]
