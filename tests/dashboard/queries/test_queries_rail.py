"""The groups and events that the rail of a run's home page lists."""

from dataclasses import replace
from typing import Any

import numpy as np
from support.pages.run_data import STATUS, T, consumed_rows, measured, run_data

from configs.stored import changed_keys
from dashboard.pages.rail import notable_groups
from dashboard.queries.events import config_changes, latest_events, promotions
from dashboard.read.model import RunData
from dashboard.views.home import HOME
from millrace.evaluation.promotion import PromotionDecision
from millrace.runs.record import AttemptEnd

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
    result = {notable_group.why: notable_group for notable_group in notable_groups(run_data(consumed=consumed))}
    assert {why: group.row[1] // 2 for why, group in result.items()} == {"best": 3, "worst": 2, "no spread": 2}
    best = result["best"]
    assert (best.row, best.policy_version, best.reward) == ((1, 6), 32, 0.75)


PROMOTED = PromotionDecision(promoted=True, policy_version=2, accuracy=0.5, sentence="it is better", bar=0.25)
RESTART = {"t": T - 0.5, "kind": "stage.restarted", "sentence": "score-0 was started again", "stage": "score-0"}
ALARM = {"t": T - 100, "kind": "probe.alarm", "sentence": "generate-0 differs", "stage": None}
RAISED = {"t": T - 1.5, "policy_version": 1, "change": "bound raised to 5", "reason": "the trainer waits"}


def _run(**changes: Any) -> RunData:
    """Three steps in the last three seconds; an alarm long before them, a decision, a promotion and a restart."""
    status = {**STATUS, "incidents": {"latest": [ALARM, RESTART]}, "decisions": {"latest": [RAISED]}}
    run = run_data(metrics={"train-0": {"reward_mean": measured([0.0, 0.5, 1.0])}}, status=status, **changes)
    first = replace(run.info.attempts[0], promotion=PROMOTED, end=AttemptEnd(state="finished", t=T - 1.3))
    second = replace(first, number=1, t_started=T - 1.2, first_step=2, promotion=None, changes=("seed was 1 and is 2",))
    return replace(run, info=replace(run.info, attempts=(first, second)))


def test_events_of_every_kind_are_listed_with_their_versions_the_newest_first() -> None:
    result = latest_events(_run(), 9)
    assert [(event.kind, event.policy_version) for event in result] == [
        ("restart", 2), ("resumed", 2), ("promotion", 2), ("decision", 1), ("incident", 0),
    ]  # fmt: skip
    assert latest_events(_run(), 2) == result[:2]
    assert latest_events(run_data(status=None, metrics={}), 9) == []


def test_a_version_that_was_held_back_is_an_event_and_no_promotion() -> None:
    run = _run()
    held = replace(run.info.attempts[0], promotion=replace(PROMOTED, promoted=False))
    run = replace(run, info=replace(run.info, attempts=(held,)))
    assert [event.kind for event in latest_events(run, 9)][1] == "held back"
    assert promotions(run) == {}
    assert list(promotions(_run())) == [2]


def test_a_resumed_run_tells_which_settings_it_changed_and_where() -> None:
    assert config_changes(_run()) == {2: ("seed was 1 and is 2",)}
    assert config_changes(run_data()) == {}


def test_changed_and_added_sources_are_events_and_marks_in_charts() -> None:
    before = {"sources": {"math": {"weight": 1.0}}}
    after = {"sources": {"math": {"weight": 2.0}, "words": {"weight": 1.0}}}
    changes = tuple(changed_keys(before, after))
    run = _run(consumed=consumed_rows([1, 2, 3]))
    first, second = run.info.attempts
    run = replace(run, info=replace(run.info, attempts=(first, replace(second, changes=changes))))
    (sentences,) = config_changes(run).values()
    assert len(sentences) == 2
    assert any("sources.math.weight" in sentence for sentence in sentences)
    assert any("sources.words" in sentence for sentence in sentences)
    (resumed,) = [event for event in latest_events(run, 9) if event.kind == "resumed"]
    assert all(sentence in resumed.words for sentence in sentences)
    (label,) = [note for note in HOME.blocks[0].build([run]).layout.annotations if note.hovertext]
    assert all(sentence.split(" was ")[0] in label.hovertext for sentence in sentences)


def test_a_run_that_was_resumed_after_a_kill_says_so() -> None:
    run = _run()
    killed, resumed = run.info.attempts
    after_kill = replace(run, info=replace(run.info, attempts=(replace(killed, end=None), resumed)))
    words = [event.words for each in (run, after_kill) for event in latest_events(each, 9) if event.kind == "resumed"]
    assert "kill" not in words[0]
    assert "kill" in words[1]
