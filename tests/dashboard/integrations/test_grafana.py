"""The Grafana board and the alerts: they ask only for series that are exposed, and no panel mixes units."""

import json
import re
from pathlib import Path

import pytest
import yaml

from dashboard.integrations.prometheus import FAMILIES
from dashboard.queries.verdict.advice import ADVICE

_BOARD = Path(__file__).parents[3] / "dashboard" / "integrations" / "grafana.json"
_UNITS = {
    "policy versions": (
        "millrace_step_staleness_mean", "millrace_step_staleness_max", "millrace_staleness_mean",
        "millrace_staleness_max", "millrace_staleness_bound", "millrace_oldest_group_versions",
        "millrace_promoted_version",
    ),
    "rollouts": (
        "millrace_rollouts_total", "millrace_generated_rollouts_total", "millrace_in_flight_rollouts",
        "millrace_buffered_rollouts",
    ),
    "tokens": (
        "millrace_tokens_total", "millrace_generating_tokens", "millrace_continued_tokens_total",
        "millrace_discarded_tokens_total", "millrace_response_length_mean_tokens",
    ),
    "seconds": (
        "millrace_stage_seconds_total", "millrace_push_seconds", "millrace_generator_pause_seconds",
        "millrace_last_status_seconds", "millrace_oldest_group_seconds",
    ),
    "share": (
        "millrace_masked_token_share", "millrace_zero_advantage_share", "millrace_clip_fraction",
        "millrace_effective_sample_size", "millrace_evaluation_accuracy", "millrace_truncated_share",
    ),
    "ratio": ("millrace_length_ratio", "millrace_reward_ratio", "millrace_importance_ratio_p95"),
    "nats per token": ("millrace_entropy", "millrace_mismatch_kl"),
    "groups": (
        "millrace_generating_groups", "millrace_overtaken_groups_mean", "millrace_overtaken_groups_max",
    ),
    "requests": ("millrace_generating_requests",),
    "restarts": ("millrace_restarts_total",),
    "cores": ("millrace_cpu_cores",),
    "bytes": ("millrace_memory_bytes",),
    "reward": ("millrace_reward_mean",),
    "gradient norm": ("millrace_gradient_norm",),
    "loss": ("millrace_loss",),
}  # fmt: skip
"""Of everything that a panel with an axis shows."""


def _board() -> dict:
    return json.loads(_BOARD.read_text())


def test_the_board_asks_for_no_series_that_is_not_exposed_and_leaves_none_out() -> None:
    asked = {
        name
        for panel in _board()["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"\bmillrace_\w+", target["expr"])
    }
    exposed = {f"{name}_total" if family.counts else name for name, family in FAMILIES.items()}
    assert asked <= exposed
    # The target of a run is in the dashboard; on a board it would be a second scale.
    assert exposed - asked == {"millrace_policy_version_target"}


def _asked(expression: str) -> set[str]:
    return set(re.findall(r"\bmillrace_\w+", expression))


def test_no_panel_has_two_units_on_its_axis() -> None:
    units = {name: unit for unit, names in _UNITS.items() for name in names}
    panels = [panel for panel in _board()["panels"] if panel["type"] == "timeseries"]
    assert len(panels) > 20
    for panel in panels:
        found = {
            units[name] + (" per second" if "rate(" in target["expr"] and "/ sum" not in target["expr"] else "")
            for target in panel["targets"]
            for name in _asked(target["expr"])
        }
        if panel["title"] == "Idle share":
            # Seconds of seconds.
            found = {"share"}
        assert found == {panel["fieldConfig"]["defaults"]["custom"]["axisLabel"]}, panel["title"]


def test_restarts_promotions_and_what_is_bad_are_marked_in_every_panel() -> None:
    marks = {mark["name"]: mark for mark in _board()["annotations"]["list"]}
    assert {name: _asked(mark["expr"]) for name, mark in marks.items()} == {
        "Bad": {"millrace_verdict"},
        "Restarts": {"millrace_restarts_total"},
        "Resumed": {"millrace_attempts_total"},
        "Promotions": {"millrace_promoted_version"},
    }
    for mark in marks.values():
        assert 'run=~"$run"' in mark["expr"]
        assert mark["enable"]
        (name,) = _asked(mark["expr"])
        labels = set(re.findall(r"\{\{(\w+)\}\}", mark["titleFormat"]))
        assert labels <= {"run", *FAMILIES[name.removesuffix("_total")].labels}, mark


def test_the_alerts_ask_only_for_what_is_exposed_and_name_causes_of_the_verdict() -> None:
    (group,) = yaml.safe_load(_BOARD.with_name("alerts.yaml").read_text())["groups"]
    rules = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    assert rules.keys() == {
        "MillraceHanging", "MillraceKilled", "MillraceFailed", "MillraceStageDead", "MillraceLedger",
        "MillraceCollapsed", "MillraceTooStale",
    }  # fmt: skip
    exposed = {f"{name}_total" if family.counts else name for name, family in FAMILIES.items()}
    for name, expression in rules.items():
        assert _asked(expression) <= exposed, name
        for causes in re.findall(r'cause=~?"([^"]+)"', expression):
            assert set(causes.split("|")) <= {*ADVICE, "silent"}, name


@pytest.mark.parametrize(
    "panel", [p for p in _board()["panels"] if p["type"] != "row"], ids=lambda panel: panel["title"]
)
def test_a_panel_says_what_it_shows_and_asks_the_data_source_and_the_runs_chosen(panel: dict) -> None:
    assert panel["description"].endswith(".")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for target in panel["targets"]:
        for selector in re.findall(r"\bmillrace_\w+\{([^}]*)\}", target["expr"]):
            assert 'run=~"$run"' in selector
        labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        (name,) = set(re.findall(r"\bmillrace_\w+", target["expr"]))
        assert labels <= {"run", *FAMILIES[name.removesuffix("_total")].labels}, target


def test_the_board_has_a_data_source_to_choose_and_no_two_panels_in_one_place() -> None:
    board = _board()
    assert board["schemaVersion"] >= 39
    assert [(v["name"], v["type"]) for v in board["templating"]["list"]] == [
        ("datasource", "datasource"),
        ("run", "query"),
    ]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [
        (x, y)
        for panel in board["panels"]
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
