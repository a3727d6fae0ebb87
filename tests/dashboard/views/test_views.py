"""Views: every block of them, over one run, several, and one that has hardly begun."""

from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from support.pages.consumed_rows import consumed_rows
from support.pages.run_data import STATUS, T, generating, measured, run_data

from dashboard.queries.flow import SYNC
from dashboard.queries.learning import RATIO_QUANTILES
from dashboard.read.model import Columns, RunData
from dashboard.views.blocks import Block, Chart, Rows, Table
from dashboard.views.registry import VIEWS
from millrace.rollouts.ledger import Account, Amount

_BLOCKS = {block.id: block for view in VIEWS for block in view.blocks}
_EACH = pytest.mark.parametrize("block", _BLOCKS.values(), ids=_BLOCKS)
_CHARTS = {name: block for name, block in _BLOCKS.items() if isinstance(block, Chart)}

_STEP = (
    *("reward_mean", "response_length_mean_tokens", "buffered_rollouts", "in_flight_rollouts"),
    *(
        "learning_rate",
        "loss",
        "grad_norm",
        "entropy",
        "clip_fraction",
        "effective_sample_size",
        "mismatch_kl",
        "importance_ratio_mean",
    ),
    *("chi_square", "kl_to_reference", "changed_weight_share"),
    *("overtaken_groups_mean", "overtaken_groups_max", "masked_token_share", "length_ratio", "reward_ratio"),
    *("zero_advantage_share", "truncated_share", "reward_component/math", "reward_component/format"),
    *("trained_tokens_of_staleness/0", "trained_tokens_of_staleness/2"),
    *(f"importance_ratio_{quantile}" for quantile in RATIO_QUANTILES),
)


_DECISION = {
    "t": T,
    "incarnation": 0,
    "policy_version": 5,
    "action": "raise",
    "change": "bound raised to 2",
    "max_staleness": 2,
    "places": 64,
    "reason": "the trainer waits 20% of its time",
    "measured": {},
}


def _time(*kinds: str) -> dict[str, Columns]:
    return {f"time/{kind}/seconds": measured([0.5, 0.5]) for kind in kinds} | {
        "total/tokens": measured([5.0, 9.0]), "usage/cpu_cores": measured([0.9, 1.8]),
        "usage/memory_bytes": measured([2.0**30, 2.0**31]),
    }  # fmt: skip


def _run(run_id: str = "mine", **changes: Any) -> RunData:
    """One that has something for every chart."""
    account = Account()
    account.train(Amount(rollouts=3, tokens=12), generator=0, staleness=0, reward_sum=1.0)
    account.drop("stale", Amount(rollouts=1, tokens=4), generator=0, reward_sum=0.0)
    values: dict[str, Any] = {
        "status": {**STATUS, "decisions": {"count": 2, "latest": [_DECISION, {**_DECISION, "policy_version": 9}]}},
        "metrics": {
            "train-0": {name: measured([0.5, 0.25]) for name in _STEP} | _time("train", "waiting for scored groups"),
            "generate-0": _time("generate", "update_weights")
            | {"pause_seconds": measured([0.1]), "delivery/shm/seconds": measured([0.2])},
            "score-0": _time("score"),
            SYNC: _time("sync") | {"push_seconds": measured([0.2, 0.3])},
        },
        "consumed": consumed_rows(
            [1, 1, 2, 2], outcome=[0, 1, 0, 0], staleness=[0, 5, 1, 2], tokens=4, reward=[1.0, 0.0, np.nan, 0.0],
            trajectory_row_id=range(4), group_id=[1, 1, 2, 2], sample_index=[0, 1, 0, 1],
            min_policy_version=0, max_policy_version=[0, 0, 1, 2],
        ),
        "stage_status": {
            "train-0": {
                "account": account.to_json(), "policy_version": 2, "seconds": {"train": 6.0, "idle": 2.0},
            },
            "generate-0": generating(
                seconds={"generate": 3.0, "idle": 5.0}, oldest_version_in_flight=1, t_oldest_in_flight=T - 65.0
            ),
        },
    }  # fmt: skip
    return run_data(run_id, **{**values, **changes})


_JUST_BEGUN = run_data(
    "new",
    status=None,
    stage_status={},
    metrics={},
    consumed=consumed_rows([]),
    evaluations={
        name: np.empty(0)
        for name in ("policy_version", "accuracy", "accuracy_low", "accuracy_high", "num_prompts", "t", "seconds")
    },
)


def _table(name: str, *runs: RunData) -> Rows:
    block = _BLOCKS[name]
    assert isinstance(block, Table)
    return block.build(runs)


def test_views_and_blocks_have_names_of_their_own() -> None:
    assert [view.name for view in VIEWS] == ["staleness", "flow", "learning", "ledger"]
    assert len(_BLOCKS) == sum(len(view.blocks) for view in VIEWS)
    assert all(name.replace("-", "").isalnum() for name in _BLOCKS)


@_EACH
def test_every_block_says_in_a_sentence_what_it_shows(block: Block) -> None:
    assert block.title
    assert block.sentence.endswith(".")


@_EACH
@pytest.mark.parametrize("runs", [[_run()], [_run("a"), _run("b")]], ids=["one run", "two runs"])
def test_every_block_shows_something_of_a_run_that_trains(block: Block, runs: list[RunData]) -> None:
    shown = block.build(runs)
    if isinstance(shown, Rows):
        assert shown.rows
        assert {len(row) for row in shown.rows} == {len(shown.header)}
        return
    assert shown.data
    titles = [axis.title.text for axis in (*shown.select_xaxes(), *shown.select_yaxes())]
    assert sum(bool(title) for title in titles) >= 2


@_EACH
def test_every_block_can_be_made_of_a_run_that_has_hardly_begun(block: Block) -> None:
    shown = block.build([_JUST_BEGUN])
    if isinstance(shown, go.Figure):
        assert not shown.data
        (why,) = shown.layout.annotations
        assert why.text.endswith(".")


@pytest.mark.parametrize("block", _CHARTS.values(), ids=_CHARTS)
def test_one_that_has_hardly_begun_does_not_hide_another(block: Chart) -> None:
    assert block.build([_JUST_BEGUN, _run("b")]).data


def test_an_older_run_has_every_block_but_those_of_what_it_did_not_measure() -> None:
    newer = _run()
    older = _run(
        "older",
        status=STATUS,
        metrics={name: {} for name in newer.metrics},
        stage_status={"generate-0": {"doing": "generate", "t": T, "seconds": {}}},
    )
    left_out = {block.id for view in VIEWS for block in view.blocks if block not in view.blocks_for([older])}
    assert left_out == {
        "flow-in-flight", "flow-overtaken", "staleness-masked", "staleness-ratios", "staleness-bias",
        "staleness-decisions", "staleness-by-token",
        "learning-zero-advantage-share",
    }  # fmt: skip
    assert all([*view.blocks_for([older, newer])] == [*view.blocks] for view in VIEWS)
    assert _table("flow-in-flight", older, newer).rows[0][:2] == ["mine", "generate-0"]
    assert [row[0] for row in _table("staleness-bias", older, newer).rows] == ["mine", "mine"]


def test_of_what_an_older_run_did_not_record_the_chart_says_so() -> None:
    for name in ("learning-reward-components", "learning-truncated"):
        (why,) = _CHARTS[name].build([_run(metrics={})]).layout.annotations
        assert why.text == "Not recorded in this run."
        (why,) = _CHARTS[name].build([_JUST_BEGUN]).layout.annotations
        assert why.text == "No step was finished yet."


def test_each_component_of_the_reward_has_a_line_and_hostile_names_stay_text() -> None:
    hostile = "<img src=x onerror=alert(1)>"
    metrics = {"train-0": {"reward_component/math": measured([0.5]), f"reward_component/{hostile}": measured([1.0])}}
    one, two = _CHARTS["learning-reward-components"].build([_run(metrics=metrics)]).data
    assert (one.name, one.y.tolist(), two.name) == ("&lt;img src=x onerror=alert(1)&gt;", [1.0], "math")
    compared = _CHARTS["learning-reward-components"].build([_run("a"), _run("b")])
    assert [trace.name for trace in compared.data] == ["a, format", "a, math", "b, format", "b, math"]


def test_what_each_replica_uses_of_its_machine_has_a_line() -> None:
    lines = {trace.name: trace.y.tolist() for trace in _CHARTS["flow-memory"].build([_run()]).data}
    assert lines == {name: [1.0, 2.0] for name in ("generate-0", "score-0", "train-0", "sync_weights-0")}
    assert [trace.name for trace in _CHARTS["flow-cpu"].build([_run("a"), _run("b")]).data] == ["a", "b"]
    (why,) = _CHARTS["flow-cpu"].build([_run(metrics={})]).layout.annotations
    assert why.text == "Not recorded in this run."


def test_decisions_are_listed_with_their_reasons_the_newest_first() -> None:
    rows = _table("staleness-decisions", _run()).rows
    assert [row[0] for row in rows] == ["9", "5"]
    assert rows[1][1:] == ("bound raised to 2", "2", "64", "the trainer waits 20% of its time")


def test_what_is_in_flight_is_shown_with_its_age_and_the_bound() -> None:
    table = _table("flow-in-flight", _run())
    assert table.rows == [("generate-0", "12", "5", "700", "65.0", "1 of 4", "40", "7")]
    assert (table.verdict, table.note) == (None, "")
    drained = _run(stage_status={"generate-0": generating(doing="stopped")})
    assert _table("flow-in-flight", drained).rows == [("generate-0", "–", "–", "700", "–", "–", "40", "7")]


@pytest.mark.parametrize(
    ("staleness", "consequence"),
    [
        ({}, "the trainer drops a group that is older"),
        ({"too_old": "drop"}, "the trainer drops a group that is older"),
        ({"too_old": "wait"}, "the trainer drops a group that is older"),
        ({"too_old": "mask"}, "tokens that are older carry no loss"),
    ],
)
def test_a_straggler_beyond_the_bound_is_named_with_what_becomes_of_it(
    staleness: dict[str, str], consequence: str
) -> None:
    run = _run()
    statuses = {**run.stage_status, "train-0": {**run.stage_status["train-0"], "policy_version": 6}}
    late = _run(stage_status=statuses, info=replace(run.info, config={"staleness": staleness}))
    table = _table("flow-in-flight", late)
    assert table.verdict == "bad"
    assert table.note == (
        f"mine: the oldest group of generate-0 is 5 policy versions old, beyond the bound of 4: {consequence}."
    )
    assert table.rows[0][5] == "5 of 4"


def _with_lengths(run_id: str, *ratios: float) -> RunData:
    return _run(run_id, metrics={"train-0": {"length_ratio": measured([*ratios])}})


def test_the_length_bias_is_good_within_the_band() -> None:
    table = _table("staleness-bias", _with_lengths("mine", 0.9, *[1.02] * 24))
    assert (table.verdict, table.note) == ("good", "")
    assert table.rows == [("mean length", "1.020", "1.015", "0.900", "1.020", "1 of 25")]


def test_the_length_bias_is_bad_outside_the_band_and_says_which_way() -> None:
    biased = [_with_lengths(name, *[ratio] * 20) for name, ratio in (("a", 0.9), ("b", 1.04), ("c", 1.0))]
    table = _table("staleness-bias", *biased)
    assert table.verdict == "bad"
    assert table.note == (
        "a: the responses trained are shorter than all that were taken, 0.900 of their length, outside 0.97 to 1.03. "
        "b: the responses trained are longer than all that were taken, 1.040 of their length, outside 0.97 to 1.03."
    )


def test_the_band_is_marked_behind_the_ratios() -> None:
    (band,) = _CHARTS["staleness-ratios"].build([_run()]).layout.shapes
    assert (band.y0, band.y1, band.layer) == (0.97, 1.03, "below")


def test_compared_runs_are_named_and_keep_their_colours() -> None:
    block = _CHARTS["learning-loss"]
    figure = block.build([_run("a"), _run("b")])
    assert [trace.name for trace in figure.data] == ["a", "b"]
    assert len({trace.line.color for trace in figure.data}) == 2
    (only,) = block.build([_JUST_BEGUN, _run("b")]).data
    assert only.line.color == figure.data[1].line.color


def test_staleness_is_shown_with_the_bound() -> None:
    mean, largest, bound = _CHARTS["staleness-over-time"].build([_run()]).data
    assert (mean.name, mean.x.tolist(), mean.y.tolist()) == ("mean", [1, 2], [0, 1.5])
    assert (largest.name, largest.y.tolist()) == ("largest", [0, 2])
    assert (bound.name, bound.x.tolist(), bound.y.tolist(), bound.line.shape) == ("bound", [0, 2], [4, 4], "hv")


def test_what_was_dropped_stands_beside_what_was_trained() -> None:
    assert _table("staleness-outcomes", _run()).rows == [
        ("trained", "3", "12", "4.00", "1.00", "0.500"),
        ("stale", "1", "4", "4.00", "1.00", "0.000"),
    ]


def test_the_balance_is_good_where_the_parts_add_up() -> None:
    table = _table("ledger-balance", _run())
    assert table.verdict == "good"
    assert (table.rows[0], table.rows[-3]) == (("generated", "30", "90"), ("sum of the parts", "30", "90"))
    assert [row[0] for row in table.rows[-2:]] == ["of the trained: masked, too old", "generated twice"]
    assert len(table.rows) == 9


def test_the_balance_is_bad_where_they_do_not() -> None:
    run = _run()
    assert run.status is not None
    ledger = {**run.status["ledger"], "trained": {"rollouts": 12, "tokens": 35}}
    table = _table("ledger-balance", _run(status={**run.status, "ledger": ledger}))
    assert table.verdict == "bad"
    assert table.note == "mine: the parts do not add up to what was generated."


def test_the_balance_is_bad_where_it_is_unknown_and_says_what_is_wrong() -> None:
    broken = _run("b", status=None, problems=("rows 3 to 5 are counted twice.",))
    table = _table("ledger-balance", _run("a"), broken)
    assert table.verdict == "bad"
    assert table.note == "b: rows 3 to 5 are counted twice."
    assert {row[0] for row in table.rows} == {"a"}


def test_an_account_that_the_rows_bear_out_is_good() -> None:
    table = _table("ledger-recount", _run())
    assert (table.verdict, table.note) == ("good", "Both as of version 2.")
    assert table.rows[0] == ("trained", "3", "3", "12", "12")


def test_an_account_that_they_do_not_is_bad() -> None:
    shorter = consumed_rows([1, 2], tokens=4)
    assert _table("ledger-recount", _run("a"), _run("b", consumed=shorter)).verdict == "bad"


def test_dropped_groups_are_named_by_their_rows() -> None:
    assert _table("ledger-drops", _run()).rows == [("1", "0", "1 to 1", "1", "stale", "5")]


def test_overlap_is_shown_in_figures() -> None:
    assert _table("flow-overlap", _run()).rows == [("9.0", "train", "1.50", "8.0", "1.12", "0.75")]
    assert _table("flow-times", _run()).rows[0] == ("generate", "1", "3.0", "5.0", "38 %")
