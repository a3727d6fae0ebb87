"""One group in full: its prompt, and the scores, outcome and tokens of each response.

All text from models and runs is shown as children of elements, never as markup.
"""

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from dash import html
from dash.development.base_component import Component

from dashboard.pages.draw import facts, problem_box, prompt_messages, role_mark, roles_in_response
from dashboard.read.groups import Group, Row, StoredResponse
from dashboard.read.search import Colouring
from dashboard.read.tokens import TokenTexts, shortened, visible

MAX_RESPONSES = 64
"""Responses shown per group. Only an unreadable part has more, because its groups can't be separated."""
MAX_TOKENS = 2000
"""Tokens shown per response."""
_MAX_CHARACTERS = 20_000
_BELOW, _ABOVE, _GREY = "0, 114, 178", "213, 94, 0", "128, 128, 128"
_OPAQUE = 0.65
_MOST_NATS = 5.0
"""Entropy or −log μ from which on the colour of a token is opaque."""
_ENVIRONMENT = {"fontStyle": "italic", "textDecoration": "underline dotted"}
"""Style of tokens written by the environment."""
Shade = Callable[[StoredResponse, int], str]
"""Response and number of a token → CSS colour."""


def view(group: Group, texts: TokenTexts, colouring: Colouring = "ratio") -> Component:
    """Draws the prompt and the responses, the lowest reward first; repeats of a response are folded below it."""
    first, last = group.responses[0].row_id, group.responses[-1].row_id
    shade = _shade(group, colouring)
    hidden = len(group.responses) - MAX_RESPONSES
    parts = [
        html.H2(f"Group {group.group_id}" if group.group_id >= 0 else "Responses of a part that can't be read"),
        problem_box([visible(problem) for problem in group.problems]),
        _prompt(group, texts, f"generator {group.generator}, rows {first:,} to {last:,} of its stream"),
        *(_responses(same, texts, shade) for same in _merged(group.responses[:MAX_RESPONSES])),
        _legend(texts, colouring),
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


def nats_colour(nats: float) -> str:
    """Returns the CSS colour of a token with this entropy or −log μ: transparent at 0, opaque at 5; grey for NaN."""
    if np.isnan(nats):
        return colour(nats)
    return f"rgba({_ABOVE}, {float(np.clip(nats / _MOST_NATS, 0.0, 1.0)) * _OPAQUE:.3f})"


_RATIOS = {"≤ 0.5": 0.5, "0.71": 0.5**0.5, "1": 1.0, "1.41": 2**0.5, "≥ 2": 2.0, "not trained": np.nan}
LEGENDS: Mapping[Colouring, tuple[str, str, Mapping[str, str]]] = {
    "ratio": (
        "π/μ",
        "The importance ratio: the token's probability under the policy in training just before the step, divided by "
        "its probability under the sampling policy.",
        {label: colour(ratio) for label, ratio in _RATIOS.items()},
    ),
    "logprob": (
        "log-probability",
        "That of the token under the policy that sampled it: the darker, the less likely.",
        {f"{logprob:g}": nats_colour(-logprob) for logprob in (0.0, -1.0, -2.5, -5.0)},
    ),
    "entropy": (
        "entropy",
        "Entropy of the policy's choice of the token just before the step, nats: the darker, the more alternatives.",
        {**{f"{nats:g}": nats_colour(nats) for nats in (0.0, 1.0, 2.5, 5.0)}, "not trained": nats_colour(np.nan)},
    ),
    "advantage": (
        "advantage",
        "The advantage of the response, of which each token has the same, relative to the group's largest.",
        {"lowest": colour(0.5), "0": colour(1.0), "highest": colour(2.0), "not trained": colour(np.nan)},
    ),
}
"""Colouring → name, explanation, and examples with their colours."""


def _shade(group: Group, colouring: Colouring) -> Shade:
    """Returns the function that colours token i of a response."""
    advantages = [abs(_advantage(response)) for response in group.responses]
    largest = max((each for each in advantages if np.isfinite(each)), default=0.0) or 1.0

    def shade(response: StoredResponse, token: int) -> str:
        assert response.trajectory is not None
        if colouring == "advantage":
            return colour(float(2.0 ** (_advantage(response) / largest)))
        if colouring == "logprob":
            return nats_colour(-response.trajectory["rollout_logprobs"][token])
        if colouring == "entropy":
            entropy = response.trainer_entropies if response.trajectory["loss_mask"][token] else None
            return nats_colour(np.nan if entropy is None else float(entropy[token]))
        ratios = response.importance_ratios
        return colour(np.nan if ratios is None else float(ratios[token]))

    return shade


def _advantage(response: StoredResponse) -> float:
    value = None if response.consumed is None else response.consumed["advantage"]
    return np.nan if value is None else float(value)


def _merged(responses: Sequence[StoredResponse]) -> list[list[StoredResponse]]:
    """Returns the responses by their tokens, the lowest reward first; those that can't be read stay apart."""
    same: dict[object, list[StoredResponse]] = {}
    for response in sorted(responses, key=_reward_order):
        tokens = None if response.trajectory is None else tuple(response.trajectory["response_tokens"])
        same.setdefault(response.row_id if tokens is None else tokens, []).append(response)
    return list(same.values())


def _reward_order(response: StoredResponse) -> tuple[bool, float]:
    reward = _reward(response)
    return (reward is None, 0.0 if reward is None else reward)


def _reward(response: StoredResponse) -> float | None:
    """Returns the reward that the trainer used, or that of the score if the trainer has not taken the response."""
    row = response.consumed or response.score
    return None if row is None or row["reward"] is None else float(row["reward"])


def _prompt(group: Group, texts: TokenTexts, origin: str) -> Component:
    prompt = group.prompt
    if prompt is None:
        return html.P(f"Its prompt can't be read: {origin}.", className="note")
    sampling = (
        f"temperature {prompt['temperature']:.4g}, top-p {prompt['top_p']:.4g}, "
        f"at most {prompt['max_new_tokens']} tokens; weights of trainer incarnation {prompt['incarnation']}"
    )
    named = {"prompt": visible(prompt["prompt_id"]), **_meta(prompt["meta"]), "sampling": sampling, "from": origin}
    answer = {name: named.pop(name) for name in ("answer",) if name in named}
    return html.Div(
        [
            html.Div(prompt_messages(prompt, texts, _MAX_CHARACTERS), className="prompt"),
            facts(answer),
            html.Details([html.Summary("Prompt's metadata"), facts(named)]),
        ]
    )


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


def _responses(same: Sequence[StoredResponse], texts: TokenTexts, shade: Shade) -> Component:
    """Draws a response, with the others of the same tokens folded."""
    first, *others = (_response(response, texts, shade) for response in same)
    if not others:
        return first
    times = html.Summary(f"{len(others)} more with the same tokens")
    return html.Div([first, html.Details([times, *others])])


def _response(response: StoredResponse, texts: TokenTexts, shade: Shade) -> Component:
    reward, advantage = _reward(response), _advantage(response)
    value = "none" if reward is None else f"{reward:.4g}"
    level = "unknown" if reward is None else "right" if reward > 0 else "wrong"
    head: list[Component] = [html.Strong(f"reward {value}", className=f"reward {level}")]
    head += [html.Span(f"advantage {advantage:+.3g}")] if np.isfinite(advantage) else []
    head.append(html.Span(_outcome(response), className="none"))
    details: list[Component] = [facts(_details(response))]
    parts: list[Component] = [html.Div(head, className="row")]
    if response.trajectory is not None:
        parts.append(_tokens(response, response.trajectory, texts, shade))
        details.append(_spans(response.trajectory))
    parts.append(html.Details([html.Summary("Details"), *details]))
    return html.Div(parts, className="response")


def _outcome(response: StoredResponse) -> str:
    length = "" if response.trajectory is None else f", {len(response.trajectory['response_tokens']):,} tokens"
    if response.consumed is None:
        return f"not taken by the trainer yet{length}"
    taken = response.consumed
    return f"{visible(taken['outcome'])}, for version {taken['policy_version']}, staleness {taken['staleness']}{length}"


def _details(response: StoredResponse) -> dict[str, str]:
    named: dict[str, str] = {"row": f"{response.row_id:,}"}
    consumed, score, trajectory = response.consumed, response.score, response.trajectory
    if consumed is not None:
        named["staleness in flight"] = str(consumed["staleness_in_flight"])
    if score is None:
        named["score"] = "missing or unreadable"
    else:
        named["components"] = _short(score["components"])
        named["verifier"] = f"{visible(score['status'])}, version {visible(score['verifier_version'])}"
        if score["error"] is not None:
            named["error"] = _short(score["error"])
    if trajectory is not None:
        named["finish reason"] = visible(trajectory["finish_reason"])
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


def _tokens(response: StoredResponse, trajectory: Row, texts: TokenTexts, shade: Shade) -> Component:
    ids = trajectory["response_tokens"][:MAX_TOKENS]
    ratios, logprobs, entropy = response.importance_ratios, response.trainer_logprobs, response.trainer_entropies
    roles = roles_in_response(trajectory)
    spans = []
    for i, (token_id, piece) in enumerate(zip(ids, texts.pieces(ids), strict=True)):
        ratio = np.nan if ratios is None else float(ratios[i])
        title, style = [f"token {i}, id {token_id}"], {"backgroundColor": shade(response, i)}
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
            if logprobs is None or entropy is None or np.isnan(ratio):
                title.append("not trained")
            else:
                title += [f"log π {logprobs[i]:.6g}", f"entropy {entropy[i]:.4g}", f"π/μ {ratio:.6g}"]
        if i and i in trajectory["span_starts"]:
            style["borderLeft"] = "2px solid var(--accent)"
        text = visible(piece) or f"⟨{token_id}⟩"
        spans.append(html.Span(text, title=", ".join(title), className="token", style=style))
    hidden = len(trajectory["response_tokens"]) - len(ids)
    more = [html.Span(f" … and {hidden:,} more tokens")] if hidden else []
    return html.Div([*spans, *more], className="tokens")


def _legend(texts: TokenTexts, colouring: Colouring) -> Component:
    name, sentence, examples = LEGENDS[colouring]
    swatches = [html.Span(label, style={"backgroundColor": shade}) for label, shade in examples.items()]
    swatches.append(html.Span("environment", style=_ENVIRONMENT))
    rest = "Hover over a token to see its values. Invisible characters are escaped."
    return html.Div(
        [
            html.Div([f"{name}: ", *swatches], className="ratios"),
            html.P(f"{sentence} {rest} {texts.note}".strip(), className="sentence"),
        ]
    )


def _short(text: str) -> str:
    return shortened(visible(text), _MAX_CHARACTERS)
