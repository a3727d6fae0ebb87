"""The Grafana board and the alerts: they ask only for series that are exposed, and no panel mixes units."""

import json
import re
from pathlib import Path

import yaml

from dashboard.integrations.prometheus import FAMILIES
from dashboard.queries.verdict.advice import ADVICE

_BOARD = Path(__file__).parents[3] / "dashboard" / "integrations" / "grafana.json"
_UNITS = {
    "policy versions": (
        "millrace_step_staleness_mean", "millrace_step_staleness_max", "millrace_staleness_mean",
        "millrace_staleness_max", "millrace_staleness_bound", "millrace_oldest_group_versions",
        "millrace_promoted_version", "millrace_source_staleness_mean",
    ),
    "rollouts": (
        "millrace_rollouts_total", "millrace_generated_rollouts_total", "millrace_in_flight_rollouts",
        "millrace_buffered_rollouts", "millrace_source_rollouts_total",
    ),
    "tokens": (
        "millrace_tokens_total", "millrace_generating_tokens", "millrace_continued_tokens_total",
        "millrace_discarded_tokens_total", "millrace_response_length_mean_tokens",
        "millrace_source_response_length_mean_tokens",
    ),
    "seconds": (
        "millrace_stage_seconds_total", "millrace_push_seconds", "millrace_generator_pause_seconds",
        "millrace_last_status_seconds", "millrace_oldest_group_seconds",
    ),
    "share": (
        "millrace_masked_token_share", "millrace_zero_advantage_share", "millrace_clip_fraction",
        "millrace_effective_sample_size", "millrace_evaluation_accuracy", "millrace_truncated_share",
        "millrace_source_zero_advantage_share", "millrace_evaluation_set_accuracy", "millrace_gpu_busy_share",
    ),
    "ratio": (
        "millrace_length_ratio", "millrace_reward_ratio", "millrace_importance_ratio_p95",
        "millrace_source_length_ratio",
    ),
    "nats per token": ("millrace_entropy", "millrace_mismatch_kl"),
    "groups": (
        "millrace_generating_groups", "millrace_overtaken_groups_mean", "millrace_overtaken_groups_max",
    ),
    "requests": ("millrace_generating_requests",),
    "restarts": ("millrace_restarts_total",),
    "cores": ("millrace_cpu_cores",),
    "bytes": ("millrace_memory_bytes", "millrace_gpu_memory_bytes"),
    "reward": ("millrace_reward_mean", "millrace_source_reward_mean"),
    "gradient norm": ("millrace_gradient_norm",),
    "loss": ("millrace_loss",),
}  # fmt: skip
"""Of everything that a panel with an axis shows."""


_EXPOSED = {f"{name}_total" if family.counts else name for name, family in FAMILIES.items()}


def _board() -> dict:
    return json.loads(_BOARD.read_text())


def test_the_board_asks_for_no_series_that_is_not_exposed_and_leaves_none_out() -> None:
    targets = [target for panel in _board()["panels"] for target in panel.get("targets", ())]
    queried = set().union(*(_asked(target["expr"]) for target in targets))
    assert queried <= _EXPOSED
    # The target of a run is in the dashboard; on a board it would be a second scale.
    assert _EXPOSED - queried == {"millrace_policy_version_target"}


def _asked(expression: str) -> set[str]:
    return set(re.findall(r"\bmillrace_\w+", expression))


def test_no_panel_has_two_units_on_its_axis() -> None:
    units = {name: unit for unit, names in _UNITS.items() for name in names}
    panels = [panel for panel in _board()["panels"] if panel["type"] == "timeseries"]
    assert len(panels) > 20
    for panel in panels:
        result = {
            units[name] + (" per second" if "rate(" in target["expr"] and "/ sum" not in target["expr"] else "")
            for target in panel["targets"]
            for name in _asked(target["expr"])
        }
        if panel["title"] == "Idle share":
            # Seconds of seconds.
            result = {"share"}
        assert result == {panel["fieldConfig"]["defaults"]["custom"]["axisLabel"]}, panel["title"]


def test_the_alerts_ask_only_for_what_is_exposed_and_name_causes_of_the_verdict() -> None:
    (group,) = yaml.safe_load(_BOARD.with_name("alerts.yaml").read_text())["groups"]
    for rule in group["rules"]:
        assert _asked(rule["expr"]) <= _EXPOSED, rule["alert"]
        for causes in re.findall(r'cause=~?"([^"]+)"', rule["expr"]):
            assert set(causes.split("|")) <= {*ADVICE, "silent"}, rule["alert"]


def test_every_panel_asks_for_the_chosen_runs_and_existing_labels() -> None:
    for panel in (panel for panel in _board()["panels"] if panel["type"] != "row"):
        assert panel["description"].endswith(".")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            for selector in re.findall(r"\bmillrace_\w+\{([^}]*)\}", target["expr"]):
                assert 'run=~"$run"' in selector
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            (name,) = _asked(target["expr"])
            assert labels <= {"run", *FAMILIES[name.removesuffix("_total")].labels}, target
    for mark in _board()["annotations"]["list"]:
        assert mark["enable"]
        assert 'run=~"$run"' in mark["expr"]
        assert _asked(mark["expr"]) <= _EXPOSED
