"""Prometheus scrapes the numbers of the store under documented names."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.pages.run_data import STATUS, T, generating, measured, run_data

from dashboard.integrations.prometheus import MOST_DETAILED, expose, exposition
from dashboard.read.model import OverviewRow, RunData
from dashboard.read.runs import Runs
from millrace.evaluation.promotion import PromotionDecision
from millrace.rollouts.ledger import Account, Amount
from millrace.runs.record import create_run, end_attempt
from storage.progress import write_progress
from storage.stores.factory import open_store

_CONFIG = {
    "training": {"max_steps": 10, "groups_per_step": 4},
    "pipeline": {"mode": "async"},
    "staleness": {"max_staleness": 4},
    "generation": {"replicas": 1, "group_size": 8},
    "scoring": {"replicas": 1, "reward": "exact_match"},
    "weights": {"transport": "shm"},
}
_ROW = OverviewRow(
    run_id="mine", state="running", policy_version=3, max_steps=10, reward_mean=0.5, staleness_mean=1.25,
    staleness_max=4, max_staleness=4, ages={"train": 2.0},
)  # fmt: skip


def _samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Value by name and labels; refuses a text that Prometheus's own parser refuses, and a sample given twice."""
    result: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in result, f"given twice: {key}"
            result[key] = sample.value
    return result


def _key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset({"run": "mine", **labels}.items())


def test_every_number_of_a_run_is_exposed_under_its_name_and_labels() -> None:
    samples = _samples(expose([_ROW], {"mine": run_data()}))
    assert (
        samples.items()
        >= {
            _key("millrace_run_state", state="running"): 1,
            _key("millrace_problems"): 0,
            _key("millrace_policy_version"): 3,
            _key("millrace_policy_version_target"): 10,
            _key("millrace_reward_mean"): 0.5,
            _key("millrace_staleness_mean"): 1.25,
            _key("millrace_staleness_max"): 4,
            _key("millrace_staleness_bound"): 4,
            _key("millrace_evaluation_accuracy"): 0.5,
            _key("millrace_rollouts_total", outcome="trained"): 12,
            _key("millrace_generated_rollouts_total"): 30,
            _key("millrace_buffered_rollouts"): 8,
            _key("millrace_in_flight_rollouts"): 6,
            _key("millrace_tokens_total", stage="generate"): 90,
            _key("millrace_stage_seconds_total", stage="generate", kind="busy"): 8,
            _key("millrace_stage_seconds_total", stage="sync_weights", kind="idle"): 9.5,
            _key("millrace_ledger_balanced"): 1,
            _key("millrace_last_status_seconds", stage="train", replica="0"): 2,
            _key("millrace_last_status_seconds", stage="generate", replica="1"): 5,
            _key("millrace_attempts_total"): 1,
            _key("millrace_restarts_total", stage="train", replica="0"): 0,
            _key("millrace_promoted_version"): 0,
            _key("millrace_verdict", clause="health", cause="healthy"): 0,
            _key("millrace_push_seconds"): 0.04,
            _key("millrace_step_staleness_mean"): 1.5,
            _key("millrace_loss"): -0.125,
        }.items()
    )
    assert _key("millrace_last_status_seconds", stage="score", replica="0") not in samples


def test_figures_of_sources_and_evaluation_sets_have_names_of_their_own(mixture: RunData) -> None:
    samples = _samples(expose([_ROW], {"mine": mixture}))
    for source, part in mixture.by_source.items():
        metrics = part.metrics["train-0"]
        assert samples[_key("millrace_source_reward_mean", source=source)] == metrics["reward_mean"]["value"][-1]
        assert samples[_key("millrace_source_length_ratio", source=source)] == 1
        assert samples[_key("millrace_evaluation_set_accuracy", set=source)] == 0.75
        trained = samples[_key("millrace_source_rollouts_total", source=source, outcome="trained")]
        assert trained == part.trained.sum()
    of_one_source = {name for name, _ in _samples(expose([_ROW], {"mine": run_data()}))}
    assert not {name for name in of_one_source if "_source_" in name or "_set_" in name}


def test_what_a_generator_works_on_is_exposed_by_replica() -> None:
    statuses = {
        "train-0": {"t": T, "doing": "train", "policy_version": 9},
        "generate-1": generating(),
        "generate-2": generating(doing="stopped"),
    }
    samples = _samples(expose([_ROW], {"mine": run_data(stage_status=statuses)}))
    of_generators = {key: value for key, value in samples.items() if dict(key[1]).keys() == {"run", "replica"}}
    assert of_generators == {
        _key("millrace_generating_requests", replica="1"): 12,
        _key("millrace_generating_groups", replica="1"): 5,
        _key("millrace_generating_tokens", replica="1"): 700,
        _key("millrace_oldest_group_seconds", replica="1"): 2.5,
        _key("millrace_oldest_group_versions", replica="1"): 3,
        _key("millrace_continued_tokens_total", replica="1"): 40,
        _key("millrace_discarded_tokens_total", replica="1"): 7,
        # It was drained, and its unfinished tokens are stored.
        _key("millrace_generating_tokens", replica="2"): 700,
        _key("millrace_continued_tokens_total", replica="2"): 40,
        _key("millrace_discarded_tokens_total", replica="2"): 7,
    }


def test_what_a_stage_uses_of_its_machine_is_exposed_until_it_has_stopped() -> None:
    used = {"usage/cpu_cores": measured([0.5, 1.5])}
    on_gpu = {"usage/gpu_busy_share": measured([0.5, 0.75]), "usage/gpu_memory_bytes": measured([1e9, 2e9])}
    metrics = {"train-0": used | on_gpu, "score-0": used}
    samples = _samples(expose([_ROW], {"mine": run_data(metrics=metrics)}))
    assert {key: value for key, value in samples.items() if "cpu_cores" in key[0] or "_gpu_" in key[0]} == {
        _key("millrace_cpu_cores", stage="train", replica="0"): 1.5,
        _key("millrace_gpu_busy_share", stage="train", replica="0"): 0.75,
        _key("millrace_gpu_memory_bytes", stage="train", replica="0"): 2e9,
    }


def test_where_the_status_is_unknown_the_ledger_does_not_count_as_balanced() -> None:
    broken = run_data(status=None, problems=("the ledger does not balance: rows 3 to 4 of generator 0",))
    samples = _samples(expose([_ROW], {"mine": broken}))
    assert samples[_key("millrace_ledger_balanced")] == 0
    assert samples[_key("millrace_problems")] == 1
    assert _key("millrace_buffered_rollouts") not in samples
    assert samples[_key("millrace_loss")] == -0.125


def test_what_is_not_known_yet_is_absent_and_not_zero() -> None:
    young = run_data(
        metrics={"train-0": {"loss": measured([])}},
        evaluations={name: values[:0] for name, values in run_data().evaluations.items()},
        stage_status={},
    )
    names = {name for name, _ in _samples(expose([OverviewRow(run_id="mine", state="running")], {"mine": young}))}
    assert names.isdisjoint({"millrace_loss", "millrace_evaluation_accuracy", "millrace_policy_version"})
    assert "millrace_buffered_rollouts" in names


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"stage_status": {"train-0": {"t": T - 500, "doing": "train"}}}, ("state", "hanging", 2)),
        ({"problems": ("log/3.json: torn",)}, ("health", "damaged", 2)),
        (
            {"stage_status": {"train-0": {
                "t": T, "doing": "train", "recent": {"staleness_mean": [0.5], "staleness_max": [1.0]},
                "account": Account(trained=Amount(tokens=10), masked=Amount(tokens=1)).to_json()}}},
            ("staleness", "too stale", 1),
        ),
    ],
)  # fmt: skip
def test_what_the_verdict_finds_is_exposed_under_its_cause(
    changes: dict[str, Any], expected: tuple[str, str, int]
) -> None:
    samples = _samples(expose([_ROW], {"mine": run_data(**changes)}))
    clause, cause, level = expected
    assert samples[_key("millrace_verdict", clause=clause, cause=cause)] == level


def test_restarts_are_counted_from_zero_and_the_version_promoted_last_is_exposed() -> None:
    status = {**STATUS, "incidents": {"restarts": {"generate-1": 2}, "latest": []}}
    info = run_data().info
    promoted = PromotionDecision(
        policy_version=3, promoted=True, accuracy=0.5, bar=0.25, sentence="version 3 is promoted"
    )
    attempts = (replace(info.attempts[0], promotion=promoted), replace(info.attempts[0], number=1, first_step=3))
    samples = _samples(expose([_ROW], {"mine": run_data(status=status, info=replace(info, attempts=attempts))}))
    assert samples[_key("millrace_restarts_total", stage="generate", replica="1")] == 2
    assert samples[_key("millrace_restarts_total", stage="train", replica="0")] == 0
    assert samples[_key("millrace_promoted_version")] == 3
    assert samples[_key("millrace_attempts_total")] == 2


def test_a_label_from_the_store_can_not_end_its_line_or_its_quotes() -> None:
    row = OverviewRow(run_id='x"} 1\nforged{run="y', state="running", policy_version=7)
    samples = _samples(expose([row], {}))
    assert samples[("millrace_policy_version", frozenset({("run", row.run_id)}))] == 7
    assert all(name.startswith("millrace_") for name, _ in samples)


def _store_run(root: Path, run_id: str, t: float) -> None:
    store = open_store(str(root / run_id))
    create_run(store, run_id, _CONFIG)
    write_progress(store, "train", 0, {"t": t, "doing": "train", "pid": 1, "policy_version": 2, "seconds": {}})


def test_of_many_stored_runs_all_are_listed_and_those_heard_from_last_in_detail(tmp_path: Path) -> None:
    for number in range(MOST_DETAILED + 2):
        _store_run(tmp_path, f"run-{number}", 1_700_000_000.0 + 10 * number)
    samples = _samples(exposition(Runs(str(tmp_path))))
    by_name = {
        name: sorted(dict(labels)["run"] for found_name, labels in samples if found_name == name)
        for name in ("millrace_policy_version", "millrace_ledger_balanced")
    }
    assert by_name == {
        "millrace_policy_version": [f"run-{n}" for n in range(MOST_DETAILED + 2)],
        "millrace_ledger_balanced": [f"run-{n}" for n in range(2, MOST_DETAILED + 2)],
    }


def test_a_run_that_cant_be_read_is_counted_and_the_others_are_shown(tmp_path: Path) -> None:
    _store_run(tmp_path, "sound", 1_700_000_000.0)
    end_attempt(open_store(str(tmp_path / "sound")), 0, "finished")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text('{"run_id": ')
    samples = _samples(exposition(Runs(str(tmp_path))))
    problems = {dict(labels)["run"]: value for (name, labels), value in samples.items() if name == "millrace_problems"}
    assert problems == {"sound": 0, "torn": 1}
    finished = ("millrace_run_state", frozenset({"run": "sound", "state": "finished"}.items()))
    assert samples[finished] == 1
