"""Views: every block of them, over one run, several, and one that has hardly begun."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from support.pages.run_data import STATUS, T, consumed_rows, generating, measured, run_data, with_config

from dashboard.pages.site import VIEWS
from dashboard.queries.flow import SYNC
from dashboard.queries.series import RATIO_QUANTILES
from dashboard.read.model import Columns, RunData
from dashboard.views.blocks import MINUTES, Block, Rows, Table
from dashboard.views.display import Display, displayed
from millrace.rollouts.ledger import Account, Amount

_BLOCKS = {block.id: block for view in VIEWS for block in view.blocks}
_EACH = pytest.mark.parametrize("block", _BLOCKS.values(), ids=_BLOCKS)

_STEP = (
    *("reward_mean", "response_length_mean_tokens", "buffered_rollouts", "in_flight_rollouts"),
    *("staleness_mean", "staleness_max"),
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
    *("chi_square", "kl_to_reference", "kl_to_teacher", "changed_weight_share"),
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
    "reason": "the trainer waits 20% of its time",
    "measured": {},
}


def _time(*kinds: str) -> dict[str, Columns]:
    return {f"time/{kind}/seconds": measured([0.5, 0.5]) for kind in kinds} | {
        "total/tokens": measured([5.0, 9.0]), "usage/cpu_cores": measured([0.9, 1.8]),
        "usage/memory_bytes": measured([2.0**30, 2.0**31]), "usage/gpu_busy_share": measured([0.5, 0.75]),
        "usage/gpu_memory_bytes": measured([2.0**34, 2.0**35]),
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
            min_policy_version=0, max_policy_version=[0, 0, 1, 2], source=[0, 0, 1, 1],
        ),
        "sources": ("math", "words"),
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


@_EACH
@pytest.mark.parametrize("runs", [[_run()], [_run("a"), _run("b")]], ids=["one run", "two runs"])
def test_every_block_shows_something_of_a_run_that_trains(block: Block, runs: list[RunData]) -> None:
    shown = block.build(runs)
    if isinstance(shown, Rows):
        assert shown.rows or shown.note
        assert {len(row) for row in shown.rows} <= {len(shown.header)}
        return
    assert shown.data
    titles = [axis.title.text for axis in (*shown.select_xaxes(), *shown.select_yaxes())]
    assert sum(bool(title) for title in titles) >= 2


@_EACH
@pytest.mark.parametrize("runs", [[_run()], [_run("a"), _run("b")]], ids=["one run", "two runs"])
def test_no_chart_is_over_versions_once_wall_time_is_chosen(block: Block, runs: list[RunData]) -> None:
    shown = block.build(runs)
    if isinstance(shown, go.Figure) and all(trace.type == "scatter" for trace in shown.data):
        assert displayed(shown, Display(smoothing=1, by_time=True), runs).layout.xaxis.title.text == MINUTES


@_EACH
def test_every_block_can_be_made_of_a_run_that_has_hardly_begun_and_hides_no_other(block: Block) -> None:
    shown = block.build([_JUST_BEGUN])
    if isinstance(shown, go.Figure):
        assert not shown.data
        assert len(shown.layout.annotations) == 1
        assert block.build([_JUST_BEGUN, _run("b")]).data


def test_a_block_of_what_a_run_did_not_measure_is_left_out_unless_another_run_did() -> None:
    newer = _run()
    older = _run(
        "older",
        metrics={name: {} for name in newer.metrics},
        stage_status={"generate-0": {"doing": "generate", "t": T, "seconds": {}}},
    )
    left_out = {block.id for view in VIEWS for block in view.blocks if block not in view.blocks_for([older])}
    assert {"flow-in-flight", "staleness-bias"} <= left_out
    assert all([*view.blocks_for([older, newer])] == [*view.blocks] for view in VIEWS)


def test_each_component_of_the_reward_has_a_line_and_hostile_names_stay_text() -> None:
    hostile = "<img src=x onerror=alert(1)>"
    metrics = {"train-0": {"reward_component/math": measured([0.5]), f"reward_component/{hostile}": measured([1.0])}}
    figure = _BLOCKS["learning-reward-components"].build([_run(metrics=metrics)])
    assert [trace.name for trace in figure.data] == ["&lt;img src=x onerror=alert(1)&gt;", "math"]


def test_decisions_are_listed_with_their_reasons_the_newest_first() -> None:
    rows = _table("staleness-decisions", _run()).rows
    assert [row[0] for row in rows] == ["9", "5"]
    assert _DECISION["reason"] in rows[1]


@pytest.mark.parametrize(("too_old", "verdict"), [("drop", "bad"), ("mask", "bad"), ("keep", None)])
def test_a_straggler_beyond_the_bound_is_red_unless_it_is_kept(too_old: str, verdict: str | None) -> None:
    run = _run()
    assert _table("flow-in-flight", run).verdict is None
    statuses = {**run.stage_status, "train-0": {**run.stage_status["train-0"], "policy_version": 6}}
    late = with_config(_run(stage_status=statuses), {"staleness": {"too_old": too_old}})
    assert _table("flow-in-flight", late).verdict == verdict


@pytest.mark.parametrize(("ratio", "verdict"), [(0.9, "bad"), (1.02, "good"), (1.04, "bad")])
def test_the_length_bias_is_good_within_the_band(ratio: float, verdict: str) -> None:
    table = _table("staleness-bias", _run(metrics={"train-0": {"length_ratio": measured([ratio] * 20)}}))
    assert (table.verdict, bool(table.note)) == (verdict, verdict == "bad")


def test_the_ledger_is_good_if_the_parts_add_up_and_bad_if_not_or_unknown() -> None:
    run = _run("a")
    assert run.status is not None
    lost = {**run.status["ledger"], "trained": {"rollouts": 12, "tokens": 35}}
    unknown = _run("b", status=None, problems=("rows 3 to 5 are counted twice.",))
    assert _table("ledger-balance", run).verdict == "good"
    assert _table("ledger-balance", _run(status={**run.status, "ledger": lost})).verdict == "bad"
    assert _table("ledger-balance", run, unknown).verdict == "bad"
    assert _table("ledger-recount", run).verdict == "good"
    assert _table("ledger-recount", run, _run("b", consumed=consumed_rows([1, 2], tokens=4))).verdict == "bad"
