"""The verdict on runs that are well, limited, too stale, collapsed, hanging, over or damaged."""

from dataclasses import replace
from typing import Any

import dash_mantine_components as dmc
import numpy as np
import pytest
from support.pages.run_data import STATUS, T, consumed_rows, measured, run_data, with_config

from dashboard.pages.frame import with_commands
from dashboard.pages.site import VIEWS
from dashboard.queries.flow import SYNC
from dashboard.queries.verdict.advice import ADVICE, NOTHING, judge
from dashboard.queries.verdict.facts import Facts, read_facts
from dashboard.queries.verdict.rules import CLAUSES, Clause, Verdict
from dashboard.read.model import Columns, RunData
from millrace.runs.provenance import Origin
from millrace.runtime.metrics import RECENT

STEPS = 40
WELL = {
    "reward_mean": [0.5] * STEPS,
    "entropy": [1.0] * STEPS,
    "mismatch_kl": [0.001] * STEPS,
    "staleness_mean": [1.25] * STEPS,
    "staleness_max": [3.0] * STEPS,
    "effective_sample_size": [0.98] * STEPS,
    "masked_token_share": [0.01] * STEPS,
    "zero_advantage_share": [0.3] * STEPS,
}


def _times(busy: str, waited: float, kind: str) -> dict[str, Columns]:
    """A stage's rows of time: it waited for this share of each of forty seconds."""
    return {
        f"time/{busy}/seconds": measured([1.0 - waited] * STEPS),
        f"time/waiting for {kind}/seconds": measured([waited] * STEPS),
    }


def _run(
    *,
    train: float = 0.02,
    generate: float = 0.2,
    score: float = 0.8,
    trained: dict[str, list[float]] | None = None,
    outcome: Any = 0,
    state: str = "running",
    silent: float = 1.0,
    **changes: Any,
) -> RunData:
    """A run at version 40 of 120 whose stages waited for these shares of the time."""
    status = {**STATUS, "state": state, "steps": STEPS, "max_steps": 120, "stop_at_step": 120}
    metrics = {
        "train-0": {name: measured(values) for name, values in {**WELL, **(trained or {})}.items()}
        | _times("train", train, "scored groups"),
        "generate-0": _times("generate", generate, "weights or room"),
        "score-0": _times("score", score, "trajectories"),
        SYNC: {"push_seconds": measured([0.1] * STEPS)},
    }
    written = {"doing": "waiting", "seconds": {}, "t": T - 1}
    values: dict[str, Any] = {
        "status": status,
        "metrics": metrics,
        "stage_status": {
            "train-0": {**written, "doing": "train", "t": T - silent, **_record({**WELL, **(trained or {})})},
            "generate-0": written,
            "score-0": written,
        },
        "consumed": consumed_rows(np.repeat(np.arange(1, STEPS + 1), 4), outcome=outcome),
    }
    return run_data(**{**values, **changes})


def _record(values: dict[str, list[float]]) -> dict[str, Any]:
    """The trainer's status record with these metrics."""
    recent = {name: series[-10:] for name, series in values.items() if name in RECENT}
    return {"recent": recent, "zero_advantage_share": values["zero_advantage_share"][-1]}


def _verdict(run: RunData) -> Verdict:
    return judge(read_facts(run))


def _worst(verdict: Verdict) -> Clause:
    order = ("bad", "warning", "neutral", "good")
    return min(verdict.clauses, key=lambda clause: order.index(clause.level))


def test_a_healthy_run_is_green_in_every_clause_and_needs_nothing() -> None:
    verdict = _verdict(_run())
    assert {clause.level for clause in verdict.clauses} == {"good"}
    assert verdict.clauses[0].words == "running: version 40 of 120, 1 s a step, 80 s left"
    assert verdict.advice == NOTHING


@pytest.mark.parametrize(("replicas", "too_many"), [(2, True), (1, False)])
def test_a_trainer_that_never_waits_is_the_bottleneck(replicas: int, too_many: bool) -> None:
    facts = read_facts(_run(train=0.01, generate=0.44))
    verdict = judge(replace(facts, config={"generation": {"replicas": replicas}}))
    assert (verdict.clauses[2].cause, verdict.clauses[2].level) == ("trainer-bound", "good")
    assert (verdict.advice != NOTHING) == too_many


@pytest.mark.parametrize(
    "changes",
    [
        {"idle": {"train": 0.5, "generate": 0.4, "score": 0.8}},
        {"length_bias": 0.9},
        {"dropped_share": 0.5},
    ],
)
def test_in_sync_mode_nothing_is_advised_about_the_bound(changes: dict[str, Any]) -> None:
    facts = replace(read_facts(_run()), **changes)
    assert "staleness" in judge(facts).advice
    assert judge(replace(facts, sync=True)).advice == NOTHING


@pytest.mark.parametrize(
    ("changes", "config", "advised", "not_advised"),
    [
        ({"length_bias": 0.9}, {"training": {"loss": {"name": "reinforce"}}}, "max_staleness", "to keep"),
        ({"dropped_share": 0.5}, {"training": {"loss": {"name": "reinforce"}}}, "max_staleness", "to keep"),
        ({"ess": 0.3}, {"staleness": {"control": "adaptive"}}, "learning_rate", "to adaptive"),
        ({"ess": 0.3}, {"training": {"loss": {"name": "reinforce"}}}, "max_staleness", "adaptive"),
        ({"ess": 0.3, "max_staleness": 0}, {"training": {"epochs": 2, "minibatches": 4}}, "8 updates", "disagree"),
        ({"no_spread": 0.9}, {"prompts": {"curriculum_window": 4}}, "prompts", "curriculum"),
        ({"collapse": "it fell"}, {"training": {"on_collapse": "roll_back"}}, "learning_rate", "on_collapse"),
        (
            {"idle": {"train": 0.5, "generate": 0.4}, "step_seconds": 1.0, "push_seconds": 0.9},
            {"weights": {"transport": "direct"}},
            "to shm",
            "to direct",
        ),
    ],
)
def test_a_setting_that_is_in_force_or_has_no_effect_is_not_advised(
    changes: dict[str, Any], config: dict[str, Any], advised: str, not_advised: str
) -> None:
    advice = judge(replace(read_facts(_run()), config=config, **changes)).advice
    assert advised in advice
    assert not_advised not in advice


@pytest.mark.parametrize(
    ("changes", "cause", "advised"),
    [
        ({"idle": {"train": 0.5, "generate": 0.03}}, "generator-bound", "generation.replicas"),
        (
            {"idle": {"train": 0.5, "generate": 0.4, "score": 0.0}},
            "scorer-bound",
            "scoring.workers or scoring.replicas",
        ),
        ({"idle": {"train": 0.5, "generate": 0.4}}, "waits", "staleness.max_staleness"),
        ({"idle": {"train": 0.5, "generate": 0.4}, "push_seconds": 0.9}, "sync-bound", "weights.transport"),
    ],
)
def test_a_trainer_that_waits_is_a_warning_that_names_what_it_waits_for(
    changes: dict[str, Any], cause: str, advised: str
) -> None:
    verdict = judge(replace(read_facts(_run()), **changes))
    assert (_worst(verdict).level, _worst(verdict).cause) == ("warning", cause)
    assert advised in verdict.advice


@pytest.mark.parametrize(
    ("changes", "level", "advised"),
    [
        ({"dropped_share": 0.02}, "good", None),
        ({"dropped_share": 0.125}, "warning", "staleness.too_old to keep"),
        ({"dropped_share": 0.5}, "bad", "staleness.too_old to keep"),
        ({"masked_share": 0.3}, "bad", "staleness.too_old to keep"),
    ],
)
def test_a_run_that_drops_or_masks_much_is_too_stale(changes: dict[str, Any], level: str, advised: str | None) -> None:
    verdict = judge(replace(read_facts(_run()), **changes))
    assert verdict.clauses[3].level == level
    assert advised is None or advised in verdict.advice


def test_a_run_that_keeps_old_tokens_exceeds_no_bound() -> None:
    run = _run(trained={"staleness_max": [16.0] * STEPS})
    kept = with_config(run, {"staleness": {"too_old": "keep"}})
    verdict = _verdict(kept)
    assert (verdict.clauses[3].cause, verdict.clauses[3].level) == ("admitted in bound", "good")
    assert "largest 16, admitted within" in verdict.clauses[3].words
    biased = replace(read_facts(kept), length_bias=0.9)
    assert judge(biased).advice == NOTHING, "the bound has no part in it"
    far = replace(read_facts(kept), ess=0.3)
    assert "staleness.too_old to mask" in judge(far).advice


def test_idle_shares_are_of_the_newest_two_minutes_while_a_run_goes_on() -> None:
    waits = {
        "time/train/seconds": measured([0.0] * 300 + [1.0] * 120),
        "time/waiting for scored groups/seconds": measured([1.0] * 300 + [0.0] * 120),
    }
    run = _run()
    assert read_facts(replace(run, metrics={**run.metrics, "train-0": waits})).idle["train"] == 0.0


@pytest.mark.parametrize(("ess", "level"), [(0.96, "good"), (0.9, "warning"), (0.4, "bad")])
def test_the_effective_sample_size_is_held_against_its_target_and_its_floor(ess: float, level: str) -> None:
    verdict = _verdict(_run(trained={"effective_sample_size": [ess] * STEPS}))
    assert verdict.clauses[4].level == level
    assert (verdict.advice == NOTHING) == (level == "good")


def test_an_ongoing_collapse_is_named() -> None:
    run = _run()
    collapsed = {**run.stage_status["train-0"], "collapse": "the reward was 0.500 at its best"}
    verdict = _verdict(replace(run, stage_status={**run.stage_status, "train-0": collapsed}))
    assert (_worst(verdict).cause, _worst(verdict).level) == ("collapsed", "bad")
    assert "was 0.500 at its best" in _worst(verdict).words
    assert "training.on_collapse" in verdict.advice
    assert _verdict(run).clauses[1].cause == "healthy"


@pytest.mark.parametrize(("silent", "level", "cause"), [(40.0, "warning", "silent"), (200.0, "bad", "hanging")])
def test_a_stage_that_writes_nothing_is_named_and_hangs_after_its_limit(silent: float, level: str, cause: str) -> None:
    verdict = _verdict(_run(silent=silent))
    assert (_worst(verdict).cause, _worst(verdict).level) == (cause, level)
    assert "train-0" in _worst(verdict).words
    assert ("logs/train-0.log" in verdict.advice) == (cause == "hanging")


@pytest.mark.parametrize(("t", "cause"), [(T + 1, "hanging"), (T - 20, "running")])
def test_a_pipeline_in_which_nothing_moves_hangs_though_its_stages_write(t: float, cause: str) -> None:
    stalled = {"t": t, "kind": "pipeline.stalled", "sentence": "nothing has moved for 120 s", "stage": None}
    status = {**STATUS, "incidents": {"restarts": {}, "latest": [stalled]}}
    assert _verdict(_run(status=status)).clauses[0].cause == cause


def test_a_stage_that_loads_its_model_does_not_hang() -> None:
    loading = {"train-0": {"doing": "loading the model", "seconds": {}, "t": T - 300}}
    assert _verdict(_run(stage_status=loading)).clauses[0].cause == "starting"


def test_a_run_that_has_ended_says_how() -> None:
    run = _run(state="finished", silent=9000.0)
    assert (_verdict(run).clauses[0].cause, _verdict(run).clauses[0].level) == ("finished", "good")
    assert "millrace export /runs/mine" in _verdict(run).advice
    worse = replace(run, status={**(run.status or {}), "best": {"policy_version": 0}})
    assert "millrace export" not in _verdict(worse).advice
    assert _verdict(_run(state="stopped", silent=9000.0)).clauses[0].level == "warning"


def test_a_finished_run_has_no_warning() -> None:
    slow = _run(train=0.5, generate=0.03, trained={"effective_sample_size": [0.9] * STEPS})
    assert {"warning"} < {clause.level for clause in _verdict(slow).clauses}
    finished = replace(slow, status={**(slow.status or {}), "state": "finished"})
    assert {clause.level for clause in _verdict(finished).clauses} == {"good", "neutral"}


def test_supervised_fine_tuning_shows_its_loss_in_place_of_the_sample_size() -> None:
    run = with_config(_run(trained={"loss": [0.5] * STEPS}), {"prompts": {"demonstrations": True}})
    assert _verdict(run).clauses[4].words == "loss 0.5"


@pytest.mark.parametrize("state", ["failed", "killed", "stopped"])
def test_the_copy_button_has_the_whole_command_that_continues_the_run(state: str) -> None:
    command = "/venv/bin/millrace run mine.yaml --set 'prompts.source=a `b` c' --run-id mine --resume"
    run = _run(state=state)
    started = replace(run.info.attempts[0], origin=Origin(command=command))
    run = replace(run, info=replace(run.info, attempts=(started,)))
    parts = with_commands(_verdict(run).advice)
    assert [part.value for part in parts if isinstance(part, dmc.CopyButton)] == [command]
    by_deployment = with_commands(_verdict(_run(state=state)).advice)
    assert not [part for part in by_deployment if isinstance(part, dmc.CopyButton)]
    assert "resume: latest" in str(by_deployment)


@pytest.mark.parametrize("state", ["failed", "killed"])
def test_a_run_that_died_is_bad_in_state_and_health_and_says_why(state: str) -> None:
    run = _run(state=state, silent=9000.0)
    verdict = _verdict(replace(run, status={**(run.status or {}), "cause": "its disk is full"}))
    assert [(clause.cause, clause.level) for clause in verdict.clauses[:2]] == [(state, "bad")] * 2
    assert verdict.clauses[0].words == f"{state} at version 40 of 120: its disk is full"


def test_a_damaged_run_names_what_is_damaged_and_still_says_the_rest() -> None:
    damaged = ("seg/1.arrows: its checksum differs", "log/3.json: torn")
    verdict = _verdict(_run(train=0.5, generate=0.03, problems=damaged, status=None))
    assert [clause.cause for clause in verdict.clauses] == [
        "state unknown", "damaged", "generator-bound", "in bound", "in bound",
    ]  # fmt: skip
    assert damaged[0] in verdict.clauses[1].words
    assert "millrace fsck /runs/mine" in verdict.advice


def test_new_incidents_are_told_and_old_ones_only_counted() -> None:
    probe = {"kind": "probe.alarm", "sentence": "generate-0 differs by 0.5 nats", "stage": None}
    for t, cause in ((T - 5, "alarm"), (T - 100, "healthy")):
        incidents = {"restarts": {"score-0": 2}, "latest": [{**probe, "t": t}]}
        clause = _verdict(_run(status={**STATUS, "incidents": incidents})).clauses[1]
        assert clause.cause == cause
    assert clause.words == "healthy; restarts: score-0 2 ×"


@pytest.mark.parametrize(
    ("trained", "cause"),
    [({"length_ratio": [0.9] * STEPS}, "length bias"), ({"zero_advantage_share": [0.9] * STEPS}, "no spread")],
)
def test_a_biased_length_and_groups_without_spread_are_warnings(trained: dict[str, list[float]], cause: str) -> None:
    verdict = _verdict(_run(trained=trained))
    assert (_worst(verdict).cause, _worst(verdict).level) == (cause, "warning")
    assert verdict.advice == ADVICE[cause](read_facts(_run()))


def test_what_a_run_has_not_recorded_is_said_to_be_unknown() -> None:
    begun = run_data(status=None, stage_status={}, metrics={}, consumed=consumed_rows([]))
    assert [clause.level for clause in _verdict(begun).clauses] == ["neutral", "good", "neutral", "neutral", "neutral"]
    assert {clause.cause for clause in _verdict(run_data()).clauses[2:]} == {"not recorded"}


def test_every_clause_links_to_a_block_that_exists() -> None:
    blocks = {(view.name, block.id) for view in VIEWS for block in view.blocks}
    well = Facts(
        run_url="u", state="running", idle={"train": 0, "generate": 0}, staleness_mean=0, staleness_max=0, ess=1
    )
    ill = [
        Facts(run_url="u"),
        well,
        replace(well, problems=["torn"]),
        replace(well, collapse="it fell"),
        replace(well, alarm="a"),
        replace(well, length_bias=0.5),
        replace(well, no_spread=1.0),
        replace(well, dropped_share=1.0),
    ]
    linked = {(clause.view, clause.block) for facts in ill for clause in (rule(facts) for rule in CLAUSES)}
    assert linked <= blocks
