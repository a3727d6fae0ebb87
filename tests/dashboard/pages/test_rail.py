"""The rail next to a home page's charts, and the strip of the verdict above them."""

from dataclasses import replace
from typing import Any

import dash_mantine_components as dmc
import pytest
from dash import dcc, html
from support.pages.components import components, words
from support.pages.run_data import STATUS, T, consumed_rows, measured, run_data

from dashboard.pages.frame import strip
from dashboard.pages.rail import rail
from dashboard.read.model import RunData
from millrace.runs.provenance import Origin

HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[2J"
SHOWN = "<img src=x onerror=alert(1)>\\u202e␛[2J"


def said(run: RunData, prompts: dict[tuple[int, int], str] | None = None) -> dict[str, str]:
    """The text of each section by its title."""
    result = {}
    for section in rail(run, prompts or {}):
        title, *lines = section.children
        result[title.children] = words(lines)
    return result


def run(origin: Origin | None = None, **changes: Any) -> RunData:
    """A run that took one group of two; of 30 rollouts, 12 are trained, 14 wait, 4 were dropped."""
    consumed = consumed_rows([3, 3], reward=[0.0, 1.0], sample_index=[0, 1], trajectory_row_id=[6, 7])
    made = run_data(**{"consumed": consumed, "metrics": {"train-0": {"reward_mean": measured([0.5] * 3)}}, **changes})
    attempt = replace(made.info.attempts[0], origin=origin or Origin())
    return replace(made, info=replace(made.info, attempts=(attempt,)))


def test_a_group_is_shown_with_its_prompt_in_short_and_leads_to_its_page() -> None:
    groups = rail(run(), {(0, 6): "What is\n" + "1 + " * 30 + "1?"})[0]
    links = [each for each in components(groups) if isinstance(each, dcc.Link)]
    assert {link.children: link.href for link in links} == dict.fromkeys(
        ("best", "worst"), "/run/mine/trajectories?open=0.6"
    )
    assert "What is 1 + 1" in words(groups)
    assert "1 + 1?" not in words(groups)


def test_hostile_text_stays_text_with_its_control_characters_escaped() -> None:
    latest = [{"t": T, "kind": "probe.alarm", "sentence": HOSTILE, "stage": None}]
    status = {**STATUS, "incidents": {"latest": latest}}
    origin = Origin(preset=HOSTILE, changes={HOSTILE: [HOSTILE, 1]}, flow_run="javascript:alert(1)")
    hostile = run(origin, status=status)
    result = said(hostile, {(0, 6): HOSTILE})
    for section in ("Groups", "Events", "Config"):
        assert SHOWN in result[section]
    kinds = {type(component) for component in components(rail(hostile, {(0, 6): HOSTILE}))}
    assert kinds <= {html.Section, html.H2, html.Ul, html.Li, html.P, html.Span, html.Strong, dcc.Link}


def test_ledger_and_config_are_told_in_short() -> None:
    changes = {f"training.setting_{number}": [number, "x"] for number in range(5)}
    text = said(run(Origin(preset="tiny-cpu", changes=changes)))
    assert "30 generated = 12 trained + 14 waiting + 4 dropped" in text["Ledger"]
    assert "training.setting_0" in text["Config"]
    assert "training.setting_4" not in text["Config"]
    young = said(run(consumed=consumed_rows([]), status=None, metrics={}))
    assert young.keys() == text.keys()


@pytest.mark.parametrize("address", ["http://127.0.0.1:4200/flow-runs/flow-run/1", "javascript:alert(1)", None])
def test_the_flow_run_is_linked_if_its_address_is_one(address: str | None) -> None:
    links = [each.href for each in components(rail(run(Origin(flow_run=address)), {})) if isinstance(each, html.A)]
    assert links == ([address] if address and address.startswith("http") else [])


def test_a_clause_shows_its_level_and_links_to_its_chart_and_the_advice_is_below() -> None:
    clauses, advice = strip(run_data(problems=("log/3.json: torn",))).children
    links = [item.children for item in clauses.children]
    assert [(link.children[0].title, link.className) for link in links[:3]] == [
        ("good", "good"),
        ("bad", "bad"),
        ("neutral", "neutral"),
    ]
    assert links[1].href == "/run/mine/ledger#ledger-balance"
    assert "millrace fsck" in words(advice)
    (button,) = [each for each in components(advice) if isinstance(each, dmc.CopyButton)]
    assert button.value.startswith("millrace fsck")
