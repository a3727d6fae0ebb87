"""One prompt at several policy versions: a column for each of its groups, with responses and rewards.

All text from models and runs is shown as children of elements, never as markup.
"""

from collections.abc import Callable, Sequence

import numpy as np
from dash import dcc, html
from dash.development.base_component import Component

from dashboard.pages.draw import facts, problem_box
from dashboard.pages.messages import prompt_messages
from dashboard.read.groups import Group, Place, StoredResponse
from dashboard.read.same_prompt import MAX_BYTES, MAX_PARTS, PromptGroup, SamePrompt
from dashboard.read.tokens import TokenTexts, shortened, visible

MAX_COLUMNS = 8
MAX_RESPONSES = 8
"""Responses shown per group."""
_MAX_CHARACTERS = 1500
"""Characters shown per response and per message of the prompt."""


def chosen(same_prompt: SamePrompt, opened: Place) -> list[PromptGroup]:
    """Chooses at most eight groups, evenly by version, with the first, the last and the one that begins at `opened`."""
    groups = same_prompt.groups
    if len(groups) <= MAX_COLUMNS:
        return list(groups)
    positions = np.unique(np.linspace(0, len(groups) - 1, MAX_COLUMNS).round().astype(int)).tolist()
    at = next((i for i, group in enumerate(groups) if (group.generator, group.row_id) == opened), None)
    if at is not None and at not in positions:
        nearest = min(range(1, len(positions) - 1), key=lambda i: abs(positions[i] - at))
        positions = sorted({*positions[:nearest], *positions[nearest + 1 :], at})
    return [groups[i] for i in positions]


def view(
    groups: Sequence[Group], opened: Group, same_prompt: SamePrompt, texts: TokenTexts, link: Callable[[Group], str]
) -> Component:
    """Draws the chosen `groups`; `link` returns the address that opens a group."""
    if opened.prompt is None:
        prompt: Component = html.P("Its prompt can't be read.", className="note")
    else:
        prompt = html.Div(prompt_messages(opened.prompt, texts, _MAX_CHARACTERS), className="prompt")
    columns = [_column(group, texts, link(group), here=group.group_id == opened.group_id) for group in groups]
    return html.Section(
        [
            html.H2("The same prompt at other versions"),
            html.P(_sentence(groups, same_prompt), className="sentence"),
            *_search_further(same_prompt, link(opened)),
            problem_box([visible(problem) for group in groups for problem in group.problems]),
            prompt,
            html.Div(columns, className="columns", tabIndex=0, role="region", **{"aria-label": "groups by version"}),
        ],
        className="block wide",
        id="trajectories-versions",
    )


def _sentence(groups: Sequence[Group], same_prompt: SamePrompt) -> str:
    count = len(same_prompt.groups)
    if count == 1:
        summary = "No other group answers this prompt"
    elif count > len(groups):
        summary = f"{count:,} groups answer this prompt, {len(groups)} of them shown"
    else:
        summary = f"{count:,} groups answer this prompt"
    where = (
        "all"
        if same_prompt.searched == same_prompt.parts
        else f"the newest {same_prompt.searched:,} of {same_prompt.parts:,}"
    )
    return f"{summary}, in {where} parts of the generators' streams. A prompt is used once per epoch."


def _search_further(same_prompt: SamePrompt, href: str) -> list[Component]:
    if same_prompt.searched == same_prompt.parts:
        return []
    limit = f"A search reads at most {MAX_PARTS} parts and {MAX_BYTES >> 20} MiB, newest first. "
    # Loads the whole page: Dash ignores a link to the current address.
    again = html.A("Search further back", href=f"{href}&versions=all", className="button")
    return [html.P([limit, again], className="note")]


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
