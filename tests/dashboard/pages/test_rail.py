"""The rail beside a home page's charts."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component
from support.pages.consumed_rows import consumed_rows
from support.pages.run_data import STATUS, T, measured, run_data

from dashboard.pages.rail import rail
from dashboard.read.model import RunData
from millrace.runs.provenance import Origin

HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[2J"
SHOWN = "<img src=x onerror=alert(1)>\\u202e␛[2J"


def components(root: Any) -> Iterator[Component]:
    if isinstance(root, Component):
        yield root
        yield from components(getattr(root, "children", None))
    elif isinstance(root, (list, tuple)):
        for child in root:
            yield from components(child)


def texts(root: Any) -> str:
    if isinstance(root, Component):
        return texts(getattr(root, "children", None))
    return "".join(map(texts, root)) if isinstance(root, (list, tuple)) else root or ""


def said(run: RunData, prompts: dict[tuple[int, int], str] | None = None) -> dict[str, str]:
    """The text of each section by its title."""
    found = {}
    for section in rail(run, prompts or {}):
        title, *lines = section.children
        found[title.children] = texts(lines)
    return found


def run(origin: Origin | None = None, **changes: Any) -> RunData:
    """A run that took one group of two; of 30 rollouts, 12 are trained, 14 wait, 4 were dropped."""
    consumed = consumed_rows([3, 3], reward=[0.0, 1.0], sample_index=[0, 1], trajectory_row_id=[6, 7])
    made = run_data(**{"consumed": consumed, "metrics": {"train-0": {"reward_mean": measured([0.5] * 3)}}, **changes})
    attempt = replace(made.info.attempts[0], origin=origin or Origin())
    return replace(made, info=replace(made.info, attempts=(attempt,)))


def test_a_group_is_shown_with_its_prompt_in_short_and_leads_to_its_page() -> None:
    found = rail(run(), {(0, 6): "What is\n" + "1 + " * 30 + "1?"})[0]
    links = [one for one in components(found) if isinstance(one, dcc.Link)]
    assert [(link.children, link.href) for link in links] == [
        ("best", "/run/mine/trajectories?open=0.6"),
        ("worst", "/run/mine/trajectories?open=0.6"),
    ]
    assert "best What is 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + … reward 0.5, v3" in texts(found)
    assert "its prompt can't be read" in said(run())["Groups"]


def test_what_models_and_runs_have_written_is_text_with_its_control_characters_escaped() -> None:
    latest = [{"t": T, "kind": "probe.alarm", "sentence": HOSTILE, "stage": None}]
    status = {**STATUS, "incidents": {"latest": latest}}
    origin = Origin(preset=HOSTILE, changes={HOSTILE: [HOSTILE, 1]}, flow_run="javascript:alert(1)")
    hostile = run(origin, status=status)
    found = said(hostile, {(0, 6): HOSTILE})
    for section in ("Groups", "Events", "Config"):
        assert SHOWN in found[section]
    kinds = {type(one) for one in components(rail(hostile, {(0, 6): HOSTILE}))}
    assert kinds <= {html.Section, html.H2, html.Ul, html.Li, html.P, html.Span, html.Strong, dcc.Link}


def test_the_ledger_is_four_numbers_and_says_whether_they_balance() -> None:
    assert said(run())["Ledger"] == "✓ balanced 30 generated = 12 trained + 14 waiting + 4 dropped"
    lost = {**STATUS, "ledger": {**STATUS["ledger"], "generated": {"rollouts": 31, "tokens": 93}}}
    assert said(run(status=lost))["Ledger"].startswith("✕ not balanced 31 generated")
    assert "can't be computed" in said(run(status=None))["Ledger"]


def test_the_config_is_told_against_its_preset_and_what_is_too_much_is_counted() -> None:
    changes = {f"training.setting_{number}": [number, "x"] for number in range(5)}
    config = said(run(Origin(preset="tiny-cpu", changes=changes)))["Config"]
    assert config.startswith('Against preset tiny-cpu:training.setting_0: 0 → "x"')
    assert config.endswith("and 2 more")
    assert said(run(Origin(preset="tiny-cpu")))["Config"] == "As preset tiny-cpu."
    assert said(run())["Config"] == "Its preset was not recorded in this run."


def test_the_flow_run_is_linked_if_one_was_recorded() -> None:
    address = "http://127.0.0.1:4200/flow-runs/flow-run/1"
    links = [one for one in components(rail(run(Origin(flow_run=address)), {})) if isinstance(one, html.A)]
    assert [link.href for link in links] == [address]
    assert said(run())["Prefect"] == "No flow run was recorded."


def test_a_run_that_has_just_begun_has_a_rail_too() -> None:
    found = said(run(consumed=consumed_rows([]), status=None, metrics={}))
    assert (found["Groups"], found["Events"]) == ("None was taken yet.", "None.")
