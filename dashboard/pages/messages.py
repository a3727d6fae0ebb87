"""The messages of a conversation, as a trajectory row delimits them."""

from dash import html
from dash.development.base_component import Component

from dashboard.read.groups import Row
from dashboard.read.tokens import TokenTexts, shortened, visible


def role_mark(role: str) -> Component:
    """Draws a small label with the role of a message."""
    return html.Span(visible(role), className="role")


def prompt_messages(trajectory: Row, texts: TokenTexts, most: int) -> list[Component]:
    """Draws the prompt, at most `most` characters per message, with a role label before each message."""
    tokens = trajectory["prompt_tokens"]
    begun = [(role, start) for role, start in _starts(trajectory) if start <= len(tokens)]
    if not begun:
        return [html.Div(shortened(visible(texts.text(tokens)), most))]
    ends = [*(start for _, start in begun[1:]), len(tokens)]
    return [
        html.Div([role_mark(role), shortened(visible(texts.text(tokens[start:end])), most)])
        for (role, start), end in zip(begun, ends, strict=True)
    ]


def roles_in_response(trajectory: Row) -> dict[int, str]:
    """Maps the response token that begins a message to its role, for messages after the policy's first turn."""
    first = len(trajectory["prompt_tokens"])
    return {start - first: role for role, start in _starts(trajectory) if start > first}


def _starts(trajectory: Row) -> list[tuple[str, int]]:
    return list(zip(trajectory["message_roles"], trajectory["message_starts"], strict=True))
