"""A group as a person reads it: its prompt, and of each response what it was worth and what became of every token.

Everything that a model or a run wrote stands there as text, the children of elements, and never as markup.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from dash import html
from dash.development.base_component import Component

from dashboard.groups import Group, Response
from dashboard.pages.draw import problem_box
from dashboard.tokens import TokenTexts, visible

MAX_RESPONSES = 64
"""Shown of a group; only a damaged part, whose groups nobody can tell apart, has more."""
MAX_TOKENS = 2000
"""Shown of a response."""
_MAX_CHARACTERS = 20_000
_BELOW, _ABOVE, _GREY = "0, 114, 178", "213, 94, 0", "128, 128, 128"
_OPAQUE = 0.65
_MONO = {"fontFamily": "ui-monospace, monospace", "whiteSpace": "pre-wrap", "overflowWrap": "anywhere"}
_ENVIRONMENT = {"fontStyle": "italic", "textDecoration": "underline dotted"}
"""How tokens look that the policy did not write."""


def view(group: Group, texts: TokenTexts) -> Component:
    """The whole group."""
    shown = group.responses[:MAX_RESPONSES]
    left_out = len(group.responses) - len(shown)
    parts = [
        html.H2(f"Group {group.group_id}" if group.group_id >= 0 else "Responses of a part that can't be read"),
        html.P(f"Made by generator {group.generator}, rows {_span(group)} of its stream.", className="sentence"),
        problem_box([visible(problem) for problem in group.problems]),
        _prompt(group, texts),
        html.H3("Responses"),
        _legend(texts),
        *(_response(response, texts) for response in shown),
    ]
    if left_out:
        parts.append(html.P(f"{left_out:,} more are not shown.", className="note"))
    return html.Section(parts, className="block wide", id="trajectories-opened")


def colour(ratio: float) -> str:
    """Of a token whose π/μ is `ratio`, as CSS: none at 1, full from half and from twice that; grey for NaN."""
    if np.isnan(ratio):
        return f"rgba({_GREY}, 0.25)"
    # In doublings, so that half and twice are equally far from 1.
    doublings = float(np.clip(np.log2(max(ratio, 1e-30)), -1.0, 1.0))
    return f"rgba({_BELOW if doublings < 0 else _ABOVE}, {abs(doublings) * _OPAQUE:.3f})"


def _span(group: Group) -> str:
    first, last = group.responses[0].row_id, group.responses[-1].row_id
    return f"{first:,} to {last:,}"


def _prompt(group: Group, texts: TokenTexts) -> Component:
    prompt = group.prompt
    if prompt is None:
        return html.P("Of its prompt nothing can be read.", className="note")
    facts = {"prompt": visible(prompt["prompt_id"]), **_meta(prompt["meta"])}
    facts["sampling"] = (
        f"temperature {prompt['temperature']:.4g}, top-p {prompt['top_p']:.4g}, "
        f"at most {prompt['max_new_tokens']} tokens; weights of trainer incarnation {prompt['incarnation']}"
    )
    text = visible(texts.text(prompt["prompt_tokens"]))
    return html.Div([html.Div(_cut(text), className="prompt", style=_box()), _facts(facts)])


def _meta(meta: str) -> dict[str, str]:
    """What is known of the prompt: its answer, its source. Its text is shown already, as the policy was given it."""
    try:
        values = json.loads(meta)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        return {"meta": _cut(visible(meta))}
    told = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return {visible(name): _cut(visible(value)) for name, value in told.items() if name != "prompt"}


def _response(response: Response, texts: TokenTexts) -> Component:
    parts: list[Component] = [_facts(_response_facts(response))]
    if response.trajectory is not None:
        parts += [_spans(response.trajectory), _tokens(response, texts)]
    return html.Div(parts, className="response", style={"borderTop": "1px solid var(--line)", "padding": "8px 0"})


def _response_facts(response: Response) -> dict[str, str]:
    facts: dict[str, str] = {"row": f"{response.row_id:,}"}
    taken, score, trajectory = response.taken, response.score, response.trajectory
    if taken is None:
        facts["outcome"] = "not taken by the trainer yet"
    else:
        facts["outcome"] = f"{visible(taken['outcome'])}, for version {taken['policy_version']}"
        facts["staleness"] = f"{taken['staleness']}, {taken['staleness_in_flight']} of it in flight"
        facts["reward"] = _number(taken["reward"])
        facts["advantage"] = _number(taken["advantage"])
    if score is None:
        facts["score"] = "none that can be read"
    else:
        facts["reward"] = _number(score["reward"])
        facts["components"] = _cut(visible(score["components"]))
        facts["verifier"] = f"{visible(score['status'])}, version {visible(score['verifier_version'])}"
        if score["error"] is not None:
            facts["error"] = _cut(visible(score["error"]))
    if trajectory is not None:
        facts["finish reason"] = visible(trajectory["finish_reason"])
        facts["tokens"] = f"{len(trajectory['response_tokens']):,}"
        facts["seed"] = str(trajectory["seed"])
        facts["times"] = _times(response)
    return facts


def _times(response: Response) -> str:
    trajectory = response.trajectory
    assert trajectory is not None, "asked only where there is one"
    admitted, started, finished = (trajectory[name] for name in ("t_admitted", "t_started", "t_finished"))
    said = [f"queued {started - admitted:.3f} s", f"sampled for {finished - started:.3f} s"]
    if response.score is not None:
        said.append(f"verified for {response.score['seconds']:.3f} s")
    if response.taken is not None:
        said.append(f"its step done {response.taken['t'] - finished:.3f} s after its last token")
    return ", ".join(said)


def _spans(trajectory: Any) -> Component:
    """A bar as long as the response: which policy version sampled which of its tokens."""
    starts, length = trajectory["span_starts"], len(trajectory["response_tokens"])
    ends = [*starts[1:], length]
    bars = [
        html.Span(
            f"v{version}",
            title=f"version {version}: tokens {start} to {end - 1}",
            style={
                "flex": f"{end - start} 1 0",
                "minWidth": "0",
                "overflow": "hidden",
                "padding": "0 4px",
                "background": "var(--grid)",
                "borderLeft": "2px solid var(--accent)",
            },
        )
        for version, start, end in zip(trajectory["span_versions"], starts, ends, strict=True)
        if end > start
    ]
    return html.Div(bars, className="versions", style={"display": "flex", "fontSize": "11px", "maxWidth": "600px"})


def _tokens(response: Response, texts: TokenTexts) -> Component:
    trajectory = response.trajectory
    assert trajectory is not None, "asked only where there is one"
    ids = trajectory["response_tokens"][:MAX_TOKENS]
    ratios = response.importance_ratios
    spans = [
        _token(response, i, token_id, piece, np.nan if ratios is None else float(ratios[i]))
        for i, (token_id, piece) in enumerate(zip(ids, texts.pieces(ids), strict=True))
    ]
    left_out = len(trajectory["response_tokens"]) - len(ids)
    more = [html.Span(f" … and {left_out:,} more tokens")] if left_out else []
    return html.Div([*spans, *more], className="tokens", style=_box())


def _token(response: Response, i: int, token_id: int, piece: str, ratio: float) -> Component:
    trajectory = response.trajectory
    assert trajectory is not None, "asked only where there is one"
    said, style = [f"token {i}, id {token_id}"], {"backgroundColor": colour(ratio), "borderRadius": "2px"}
    if not trajectory["loss_mask"][i]:
        said.append("written by the environment")
        style |= _ENVIRONMENT
    elif np.isnan(ratio) or response.trainer_logprobs is None:
        said += [f"log μ {trajectory['rollout_logprobs'][i]:.6g}", "not trained"]
    else:
        said += [f"log μ {trajectory['rollout_logprobs'][i]:.6g}", f"log π {response.trainer_logprobs[i]:.6g}"]
        said.append(f"π/μ {ratio:.6g}")
    if i and i in trajectory["span_starts"]:
        style["borderLeft"] = "2px solid var(--accent)"
    return html.Span(visible(piece) or f"⟨{token_id}⟩", title=", ".join(said), className="token", style=style)


def _legend(texts: TokenTexts) -> Component:
    """What the colours mean."""
    known = [("≤ 0.5", 0.5), ("0.71", 0.5**0.5), ("1", 1.0), ("1.41", 2**0.5), ("≥ 2", 2.0), ("not trained", np.nan)]
    edge = {"padding": "0 8px", "border": "1px solid var(--line)"}
    swatches = [html.Span(label, style={**edge, "backgroundColor": colour(ratio)}) for label, ratio in known]
    swatches.append(html.Span("the environment's", style={**edge, **_ENVIRONMENT}))
    sentence = (
        "Tokens are coloured by their importance ratio π/μ: the probability that the policy in training gave the token "
        "just before the step, over that of the policy which sampled it. Point at one to read it. The bar above them "
        "says which policy version sampled which. Characters that are not seen are spelt out."
    )
    return html.Div(
        [
            html.P(f"{sentence} {texts.note}".strip(), className="sentence"),
            html.Div(["π/μ: ", *swatches], className="legend", style={"display": "flex", "gap": "4px"}),
        ]
    )


def _facts(facts: dict[str, str]) -> Component:
    named: list[Component] = [
        html.Span([html.Span(name, className="name"), html.Span(value)], className="fact")
        for name, value in facts.items()
    ]
    return html.Div(named, className="facts")


def _box() -> dict[str, Any]:
    return {**_MONO, "background": "var(--ground)", "padding": "6px 8px", "margin": "6px 0", "maxHeight": "400px"} | {
        "overflow": "auto"
    }


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} … ({len(text):,} characters)"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def outcomes(counts: Sequence[tuple[str, int]]) -> str:
    """How many responses had which outcome, in words."""
    return ", ".join(f"{count} {visible(outcome)}" for outcome, count in counts)
