"""Which runs the table shows, in which order, and what its line shows."""

from typing import Any

import pytest

from dashboard.queries.run_table import attention, busiest, chosen, curve, differing, ordered, predecessors, seeds
from dashboard.read.model import OverviewRow

EVIL = "<script>alert(1)</script> ' \" \\"

ROWS = [
    OverviewRow(
        run_id="base",
        state="finished",
        policy_version=400,
        reward_mean=0.5,
        note="the baseline",
        settings={"training.learning_rate": "1e-05", "pipeline.mode": "async", "staleness.adaptive": "false"},
    ),
    OverviewRow(
        run_id="hot",
        state="running",
        policy_version=90,
        reward_mean=0.75,
        settings={"training.learning_rate": "0.0003", "pipeline.mode": "sync", "staleness.adaptive": "true"},
    ),
    OverviewRow(run_id="evil", state="stopped", policy_version=None, note=EVIL, settings={"name": EVIL}),
    OverviewRow(run_id="coming", problem="no run.json yet"),
]


def names(text: str, *columns: str) -> list[str]:
    return [row.run_id for row in chosen(ROWS, text, columns)]


@pytest.mark.parametrize(
    ("text", "run_ids"),
    [
        ("", ["base", "hot", "evil", "coming"]),
        ("BASE", ["base"]),
        ("state=Running", ["hot"]),
        ("state!=running", ["base", "evil", "coming"]),
        ("reward>0.5", ["hot"]),
        ("step<100", ["hot"]),
        ("training.learning_rate=0.00001", ["base"]),
        ("training.learning_rate<=1e-5 state=finished", ["base"]),
        ('note="the baseline"', ["base"]),
        ("alert(1)", ["evil"]),
        ("state>3", []),
        ("reward>much", []),
        ('"open quote', []),
    ],
)
def test_a_filter_keeps_the_runs_of_which_every_term_holds(text: str, run_ids: list[str]) -> None:
    assert names(text) == run_ids


def test_a_word_is_found_in_the_columns_that_are_shown_and_in_no_others() -> None:
    assert names("sync") == []
    assert names("async", "pipeline.mode") == ["base"]
    assert names("sync", "pipeline.mode") == ["base", "hot"]


@pytest.mark.parametrize(
    ("sort", "run_ids"),
    [
        ("run", ["base", "coming", "evil", "hot"]),
        ("-reward", ["hot", "base", "evil", "coming"]),
        ("-training.learning_rate", ["hot", "base", "evil", "coming"]),
        ("note", ["evil", "base", "hot", "coming"]),
        ("nothing.such", ["base", "hot", "evil", "coming"]),
    ],
)
def test_runs_are_sorted_by_numbers_and_words_and_unknown_ones_come_last(sort: str, run_ids: list[str]) -> None:
    assert [row.run_id for row in ordered(ROWS, sort)] == run_ids


def test_only_the_keys_in_which_the_runs_differ_are_named() -> None:
    assert differing([{"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}]) == ["b", "c"]
    assert differing([{"a": "1"}]) == differing([]) == []


def test_the_line_is_the_smoothed_reward_or_the_accuracy_if_there_is_none() -> None:
    rewards = [(version, float(version % 2)) for version in range(1, 33)]
    accuracies = [(0, 0.1), (8, 0.4)]
    name, line = curve(_row("a", rewards=rewards, accuracies=accuracies))
    assert name == "reward"
    assert line.x.tolist() == list(range(1, 33))
    # Four points each: an eighth of the line.
    assert line.y[3:] == pytest.approx(0.5)
    assert curve(_row("a", rewards=rewards[:1], accuracies=accuracies))[1].y.tolist() == [0.1, 0.4]
    assert len(curve(_row("a", accuracies=accuracies[:1]))[1].x) == 0


def _row(run_id: str, **changes: Any) -> OverviewRow:
    return OverviewRow(run_id=run_id, **{"state": "finished", "policy_version": 10, "max_steps": 10, **changes})


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        (_row("a"), "finished"),
        (_row("a", state="killed", cause="gone"), "killed"),
        (_row("a", state="running", no_spread=0.9), "no spread"),
        (_row("a", no_spread=0.9), "finished"),
        (
            _row("a", state="stopped", max_staleness=4, staleness_mean=3, staleness_max=4, dropped_share=0.3),
            "too stale",
        ),
        (_row("a", ess=0.4), "far off policy"),
        (_row("a", state="running", ages={"train": 40.0}), "silent"),
        (_row("a", state="failed", cause="full", no_spread=0.9), "failed"),
    ],
)
def test_the_worst_of_what_the_status_records_tell_is_the_verdict(row: OverviewRow, cause: str) -> None:
    assert attention(row).cause == cause


def test_a_pinned_run_stays_above_worse_ones() -> None:
    rows = [_row("fine", note="keep #pinned"), _row("hurt", state="failed"), _row("well")]
    assert [row.run_id for row in ordered(rows, "-attention")] == ["fine", "hurt", "well"]


def test_evaluated_runs_that_differ_only_in_seed_and_name_are_a_group() -> None:
    same = {"seed": "1", "name": "a", "training.learning_rate": "1"}
    rows = [
        _row("a", accuracy=0.5, settings=same),
        _row("b", accuracy=0.6, settings={**same, "seed": "2", "name": "b"}),
        _row("c", accuracy=0.7, settings={**same, "training.learning_rate": "2"}),
        _row("d", settings=same),
    ]
    assert [[row.run_id for row in group] for group in seeds(rows)] == [["a", "b"]]


def test_the_run_before_is_the_latest_of_the_same_task_that_can_be_read() -> None:
    task = {"prompts.source": "a.jsonl", "scoring.reward": "math", "seed": "0", "scoring.workers": "1"}
    rows = [
        _row("a", t_started=1.0, settings=task),
        OverviewRow(run_id="torn", problem="torn"),
        _row("other-prompts", t_started=2.0, settings={**task, "prompts.source": "b.jsonl"}),
        _row("other-reward", t_started=3.0, settings={**task, "scoring.reward": "exact_match"}),
        _row("changed-file", t_started=4.0, settings=task, inputs={"prompts.source a.jsonl": "9 prompts, 01"}),
        _row("other-seed", t_started=5.0, settings={**task, "seed": "1", "scoring.workers": "8"}),
    ]
    assert {run_id: row.run_id for run_id, row in predecessors(rows).items()} == {"other-seed": "a"}


def test_the_busiest_stage_is_the_one_that_is_idle_least() -> None:
    assert busiest(_row("a", idle={"generate": 0.25, "train": 0.5})) == ("generate", 0.75)
    assert busiest(_row("a")) is None
