"""One prompt at several policy versions: a column for each of its groups, with responses and rewards.

All text from models and runs is shown as children of elements, never as markup.
"""

from collections.abc import Callable, Sequence

import numpy as np
from dash import dcc, html
from dash.development.base_component import Component

from dashboard.pages.draw import facts, problem_box, prompt_messages
from dashboard.read.groups import Group, Place, StoredResponse
from dashboard.read.tokens import TokenTexts, shortened, visible

MAX_COLUMNS = 8
MAX_RESPONSES = 8
"""Responses shown per group."""
_MAX_CHARACTERS = 1500
"""Characters shown per response and per message of the prompt."""


def chosen(groups: Sequence[Place], opened: Place) -> list[Place]:
    """Chooses at most eight groups, evenly, with the first, the last and `opened`; each by its first row."""
    if len(groups) <= MAX_COLUMNS:
        return list(groups)
    positions = np.unique(np.linspace(0, len(groups) - 1, MAX_COLUMNS).round().astype(int)).tolist()
    at = groups.index(opened)
    if at not in positions:
        nearest = min(range(1, len(positions) - 1), key=lambda i: abs(positions[i] - at))
        positions = sorted({*positions[:nearest], *positions[nearest + 1 :], at})
    return [groups[i] for i in positions]


def view(
    groups: Sequence[Group], opened: Group, num_groups: int, texts: TokenTexts, link: Callable[[Group], str]
) -> Component:
    """Draws `groups`, chosen among the `num_groups` of the prompt; `link` returns the address that opens a group."""
    if opened.prompt is None:
        prompt: Component = html.P("Its prompt can't be read.", className="note")
    else:
        prompt = html.Div(prompt_messages(opened.prompt, texts, _MAX_CHARACTERS), className="prompt")
    columns = [_column(group, texts, link(group), here=group.group_id == opened.group_id) for group in groups]
    return html.Section(
        [
            html.H2("The same prompt at other versions"),
            html.P(_sentence(len(groups), num_groups), className="sentence"),
            problem_box([visible(problem) for group in groups for problem in group.problems]),
            prompt,
            html.Div(columns, className="columns", tabIndex=0, role="region", **{"aria-label": "groups by version"}),
        ],
        className="block wide",
        id="trajectories-versions",
    )


def _sentence(num_shown: int, num_groups: int) -> str:
    summary = "No other group" if num_groups == 1 else f"{num_groups:,} groups"
    shown = f", {num_shown} of them shown" if num_groups > num_shown else ""
    return (
        f"{summary} answered this prompt{shown}. Other groups are listed once the trainer has taken them. "
        "A prompt is used once per epoch."
    )


def _column(group: Group, texts: TokenTexts, href: str, *, here: bool) -> Component:
    versions = sorted({version for response in group.responses for version in _span_versions(response)})
    title = "version unknown" if not versions else f"version {versions[0]}"
    title += f" to {versions[-1]}" if len(versions) > 1 else ""
    rewards = [
        response.score["reward"]
        for response in group.responses
        if response.score and response.score["reward"] is not None
    ]
    named = {
        "mean reward": f"{sum(rewards) / len(rewards):.3g}" if rewards else "none",
        "responses": str(len(group.responses)),
    }
    parts: list[Component] = [
        html.H3(title),
        facts(named, [html.Span("this group") if here else dcc.Link(f"group {group.group_id}", href=href)]),
        *(_response(response, texts) for response in group.responses[:MAX_RESPONSES]),
    ]
    if len(group.responses) > MAX_RESPONSES:
        parts.append(html.P(f"{len(group.responses) - MAX_RESPONSES:,} more are not shown.", className="note"))
    return html.Div(parts, className="version here" if here else "version")


def _response(response: StoredResponse, texts: TokenTexts) -> Component:
    trajectory, score, consumed = response.trajectory, response.score, response.consumed
    reward = "none" if score is None or score["reward"] is None else f"{score['reward']:.4g}"
    named = {"reward": reward, "outcome": visible(consumed["outcome"]) if consumed else "not taken yet"}
    if trajectory is None:
        return html.Div([facts(named), html.P("It can't be read.", className="note")])
    tokens = trajectory["response_tokens"]
    named |= {"tokens": f"{len(tokens):,}", "finish reason": visible(trajectory["finish_reason"])}
    text = shortened(visible(texts.text(tokens)), _MAX_CHARACTERS)
    return html.Div([facts(named), html.Div(text, className="tokens")])


def _span_versions(response: StoredResponse) -> list[int]:
    return [] if response.trajectory is None else list(response.trajectory["span_versions"])
