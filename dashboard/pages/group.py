"""One group in full: its prompt, and the scores, outcome and tokens of each response.

All text from models and runs is shown as children of elements, never as markup.
"""

import json

import numpy as np
from dash import html
from dash.development.base_component import Component

from dashboard.pages.draw import facts, problem_box
from dashboard.pages.messages import prompt_messages, role_mark, roles_in_response
from dashboard.read.groups import Group, Row, StoredResponse
from dashboard.read.tokens import TokenTexts, shortened, visible

MAX_RESPONSES = 64
"""Responses shown per group. Only an unreadable part has more, because its groups can't be separated."""
MAX_TOKENS = 2000
"""Tokens shown per response."""
_MAX_CHARACTERS = 20_000
_BELOW, _ABOVE, _GREY = "0, 114, 178", "213, 94, 0", "128, 128, 128"
_OPAQUE = 0.65
_ENVIRONMENT = {"fontStyle": "italic", "textDecoration": "underline dotted"}
"""Style of tokens written by the environment."""


def view(group: Group, texts: TokenTexts) -> Component:
    first, last = group.responses[0].row_id, group.responses[-1].row_id
    hidden = len(group.responses) - MAX_RESPONSES
    parts = [
        html.H2(f"Group {group.group_id}" if group.group_id >= 0 else "Responses of a part that can't be read"),
        html.P(f"Made by generator {group.generator}, rows {first:,} to {last:,} of its stream.", className="sentence"),
        problem_box([visible(problem) for problem in group.problems]),
        _prompt(group, texts),
        html.H3("Responses"),
        _legend(texts),
        *(_response(response, texts) for response in group.responses[:MAX_RESPONSES]),
    ]
    if hidden > 0:
        parts.append(html.P(f"{hidden:,} more are not shown.", className="note"))
    return html.Section(parts, className="block wide", id="trajectories-opened")


def colour(ratio: float) -> str:
    """Returns the CSS colour of a token with this π/μ: transparent at 1, opaque at 0.5 and 2; grey for NaN."""
    if np.isnan(ratio):
        return f"rgba({_GREY}, 0.25)"
    # Doublings are symmetric: 0.5 and 2 are equally far from 1.
    doublings = float(np.clip(np.log2(max(ratio, 1e-30)), -1.0, 1.0))
    return f"rgba({_BELOW if doublings < 0 else _ABOVE}, {abs(doublings) * _OPAQUE:.3f})"


def _prompt(group: Group, texts: TokenTexts) -> Component:
    prompt = group.prompt
    if prompt is None:
        return html.P("Its prompt can't be read.", className="note")
    sampling = (
        f"temperature {prompt['temperature']:.4g}, top-p {prompt['top_p']:.4g}, "
        f"at most {prompt['max_new_tokens']} tokens; weights of trainer incarnation {prompt['incarnation']}"
    )
    named = {"prompt": visible(prompt["prompt_id"]), **_meta(prompt["meta"]), "sampling": sampling}
    return html.Div([html.Div(prompt_messages(prompt, texts, _MAX_CHARACTERS), className="prompt"), facts(named)])


def _meta(meta: str) -> dict[str, str]:
    """Returns the prompt's metadata, such as its answer and source, without fields that its tokens show."""
    try:
        values = json.loads(meta)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        return {"meta": _short(meta)}
    return {
        visible(name): _short(value if isinstance(value, str) else json.dumps(value))
        for name, value in values.items()
        if name not in ("prompt", "messages")
    }


def _response(response: StoredResponse, texts: TokenTexts) -> Component:
    parts: list[Component] = [facts(_response_facts(response))]
    if response.trajectory is not None:
        parts += [_spans(response.trajectory), _tokens(response, response.trajectory, texts)]
    return html.Div(parts, className="response")


def _response_facts(response: StoredResponse) -> dict[str, str]:
    named: dict[str, str] = {"row": f"{response.row_id:,}"}
    consumed, score, trajectory = response.consumed, response.score, response.trajectory
    if consumed is None:
        named["outcome"] = "not taken by the trainer yet"
    else:
        named["outcome"] = f"{visible(consumed['outcome'])}, for version {consumed['policy_version']}"
        named["staleness"] = f"{consumed['staleness']}, {consumed['staleness_in_flight']} of it in flight"
        named["reward"] = _number(consumed["reward"])
        named["advantage"] = _number(consumed["advantage"])
    if score is None:
        named["score"] = "missing or unreadable"
    else:
        named["reward"] = _number(score["reward"])
        named["components"] = _short(score["components"])
        named["verifier"] = f"{visible(score['status'])}, version {visible(score['verifier_version'])}"
        if score["error"] is not None:
            named["error"] = _short(score["error"])
    if trajectory is not None:
        named["finish reason"] = visible(trajectory["finish_reason"])
        named["tokens"] = f"{len(trajectory['response_tokens']):,}"
        named["seed"] = str(trajectory["seed"])
        admitted, started, finished = (trajectory[name] for name in ("t_admitted", "t_started", "t_finished"))
        times = [f"queued {started - admitted:.3f} s", f"sampled for {finished - started:.3f} s"]
        times += [f"verified for {score['seconds']:.3f} s"] if score is not None else []
        times += [f"its step done {consumed['t'] - finished:.3f} s after its last token"] if consumed else []
        named["times"] = ", ".join(times)
    return named


def _spans(trajectory: Row) -> Component:
    """Draws a bar that shows which policy version sampled which tokens."""
    starts, length = trajectory["span_starts"], len(trajectory["response_tokens"])
    bars = [
        html.Span(
            f"v{version}",
            title=f"version {version}: tokens {start} to {end - 1}",
            style={"flex": f"{end - start} 1 0"},
        )
        for version, start, end in zip(trajectory["span_versions"], starts, [*starts[1:], length], strict=True)
        if end > start
    ]
    return html.Div(bars, className="versions")


def _tokens(response: StoredResponse, trajectory: Row, texts: TokenTexts) -> Component:
    ids = trajectory["response_tokens"][:MAX_TOKENS]
    ratios, logprobs = response.importance_ratios, response.trainer_logprobs
    roles = roles_in_response(trajectory)
    spans = []
    for i, (token_id, piece) in enumerate(zip(ids, texts.pieces(ids), strict=True)):
        ratio = np.nan if ratios is None else float(ratios[i])
        title, style = [f"token {i}, id {token_id}"], {"backgroundColor": colour(ratio)}
        if i in roles:
            spans.append(role_mark(roles[i]))
        if not trajectory["loss_mask"][i]:
            title.append("written by the environment")
            style |= _ENVIRONMENT
        else:
            title.append(f"log μ {trajectory['rollout_logprobs'][i]:.6g}")
            if trajectory["kept_counts"]:
                title.append(f"drawn from {trajectory['kept_counts'][i]:,} tokens")
            if response.teacher_logprobs:
                title.append(f"log π_T {response.teacher_logprobs[i]:.6g}")
            if logprobs is None or np.isnan(ratio):
                title.append("not trained")
            else:
                title += [f"log π {logprobs[i]:.6g}", f"π/μ {ratio:.6g}"]
        if i and i in trajectory["span_starts"]:
            style["borderLeft"] = "2px solid var(--accent)"
        text = visible(piece) or f"⟨{token_id}⟩"
        spans.append(html.Span(text, title=", ".join(title), className="token", style=style))
    hidden = len(trajectory["response_tokens"]) - len(ids)
    more = [html.Span(f" … and {hidden:,} more tokens")] if hidden else []
    return html.Div([*spans, *more], className="tokens")


def _legend(texts: TokenTexts) -> Component:
    examples = [("≤ 0.5", 0.5), ("0.71", 0.5**0.5), ("1", 1.0), ("1.41", 2**0.5), ("≥ 2", 2.0), ("not trained", np.nan)]
    swatches = [html.Span(label, style={"backgroundColor": colour(ratio)}) for label, ratio in examples]
    swatches.append(html.Span("environment", style=_ENVIRONMENT))
    sentence = (
        "Tokens are coloured by their importance ratio π/μ: the token's probability under the policy in training just "
        "before the step, divided by its probability under the sampling policy. Hover over a token to see its values. "
        "The bar above them shows which policy version sampled which tokens. Invisible characters are escaped."
    )
    return html.Div(
        [
            html.P(f"{sentence} {texts.note}".strip(), className="sentence"),
            html.Div(["π/μ: ", *swatches], className="ratios"),
        ]
    )


def _short(text: str) -> str:
    return shortened(visible(text), _MAX_CHARACTERS)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
