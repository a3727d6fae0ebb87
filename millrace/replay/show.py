"""What the trainer saw at one step of a stored run: `millrace show RUN_URL --step N`.

    ║ consumed ║ ─► the rows of step N ─► ║ trajectories ║ + ║ scores ║ ─► groups of the batch ┐
    ║ trainer_logprobs ║ − log μ ─────────────────────────────────────────► importance ratios  ├─► Shown
    attempts/, ║ metrics ║, evaluations/ ─────────────────────────────────► config, numbers    ┘

Step N makes policy version N: the policy that saw the batch is version N − 1.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.consumed import TRAINED
from millrace.errors import ReplayError
from millrace.history import read_steps
from millrace.replay.stored import StoredRun
from millrace.replay.taken import Taken, prompts, taken
from millrace.run import attempt_of_step
from millrace.types import Prompt
from storage import layout
from storage.errors import NotInStore
from storage.store import Store


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """Of π/μ over the tokens that carry loss, before clipping."""

    mean: float
    p05: float
    """Quantiles: a twentieth of the tokens is below this one, half below the next, …"""
    p50: float
    p95: float
    max: float


@dataclass(frozen=True, kw_only=True)
class ShownGroup:
    """One group of the batch; lists have one value a member."""

    group_id: int
    generator: int
    first_row_id: int
    """Of its rows in the generator's stream."""
    prompt_id: str
    prompt: str
    """Its text, as it was tokenised."""
    answer: str
    """The right one."""
    min_policy_version: int
    """Oldest policy version that sampled any of it."""
    max_policy_version: int
    """Newest policy version that sampled any of it."""
    staleness: int
    """Policy versions, when the trainer took it."""
    rewards: list[float | None]
    """None where the verifier failed; such a member was not trained on."""
    advantages: list[float | None]
    """What its tokens were weighted with; None where it was not trained on."""
    lengths: list[int]
    """Response tokens."""
    ratios: Ratios


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One optimizer step: what went in, what came out."""

    run_id: str
    run_url: str
    step: int
    """The policy version that it made."""
    incarnation: int
    """Of the trainer that made it."""
    t: float
    """When it was done, unix seconds."""
    attempt: int
    """The start of the run's controller in which it was made."""
    config: dict[str, Any]
    """In force then, as JSON."""
    groups: list[ShownGroup]
    """In the order of the batch."""
    dropped: dict[str, int]
    """Rollouts that were dropped on the way to this step, by reason."""
    ratios: Ratios
    """Over the whole batch."""
    measured: dict[str, float]
    """What the trainer measured, by metric name: loss, grad_norm, …; empty where that is damaged."""
    evaluation: dict[str, Any] | None
    """Held-out result of the version that it made; None where it was not evaluated."""
    dashboard: str | None
    """Address of its trajectories in the dashboard; None where the dashboard's is not known."""

    @property
    def staleness(self) -> dict[int, int]:
        """Groups by staleness, ascending."""
        return dict(sorted(Counter(group.staleness for group in self.groups).items()))


def show(store: Store, step: int, *, dashboard_url: str | None = None) -> Shown:
    """Step `step` of the run in `store`. `dashboard_url` is where the dashboard answers.

    Raises RunMissing, ReplayError where the run has no such step or stored too little, and StreamCorrupt or
    PartRemoved where what it stored can't be read any more.
    """
    run = StoredRun(store)
    if step not in run.steps:
        raise ReplayError(f"{run.url}: no step {step}; expected one of {run.steps[0]} to {run.steps[-1]}")
    of_step = np.flatnonzero(run.groups["step"].to_numpy() == step)
    facts = run.groups.take(of_step).to_pylist()
    batch = run.batch(step).tolist()
    staleness = run.groups["staleness"].to_numpy()[batch].tolist()
    logprobs, advantages = iter(run.trainer_logprobs(step)), iter(run.advantages(step))
    groups, ratios = [], []
    for found, prompt, lag in zip(taken(run, batch), prompts(run, batch), staleness, strict=True):
        of_group = _ratios(found, logprobs)
        ratios.append(of_group)
        groups.append(_shown(found, prompt, lag, advantages, of_group))
    attempt = attempt_of_step(store, step)
    measured = {found.policy_version: found.values for found in read_steps(store)}
    return Shown(
        run_id=run.run_id,
        run_url=run.url,
        step=step,
        incarnation=facts[0]["incarnation"],
        t=facts[0]["t"],
        attempt=attempt.number,
        config=attempt.config,
        groups=groups,
        dropped=_dropped(facts),
        ratios=_summed_up(np.concatenate(ratios)),
        measured=measured.get(step, {}),
        evaluation=_evaluation(store, step),
        dashboard=dashboard_url and f"{dashboard_url.rstrip('/')}/run/{run.run_id}/trajectories?version={step}",
    )


def _ratios(found: Taken, logprobs: Iterator[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """[N] π/μ of the group's tokens that carry loss, in the trainer's precision."""
    group = found.group
    ratios = [
        np.exp(next(logprobs) - group.rollout_logprobs[i])[group.loss_mask[i].astype(bool)] for i in found.trained
    ]
    return np.concatenate(ratios)


def _shown(
    found: Taken, prompt: Prompt, staleness: int, advantages: Iterator[float], ratios: npt.NDArray[np.float32]
) -> ShownGroup:
    group, trained = found.group, set(found.trained)
    return ShownGroup(
        group_id=group.group_id,
        generator=group.generator,
        first_row_id=group.first_row_id,
        prompt_id=prompt.prompt_id,
        prompt=prompt.text,
        answer=prompt.answer,
        min_policy_version=group.min_policy_version,
        max_policy_version=group.max_policy_version,
        staleness=staleness,
        rewards=found.rewards,
        advantages=[next(advantages) if i in trained else None for i in range(len(found.rewards))],
        lengths=[len(tokens) for tokens in group.response_tokens],
        ratios=_summed_up(ratios),
    )


def _summed_up(ratios: npt.NDArray[np.float32]) -> Ratios:
    p05, p50, p95 = np.quantile(ratios, (0.05, 0.5, 0.95)).tolist()
    return Ratios(mean=float(ratios.mean()), p05=p05, p50=p50, p95=p95, max=float(ratios.max()))


def _dropped(facts: Sequence[dict[str, Any]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for fact in facts:
        if fact["outcome"] != TRAINED:
            found[fact["outcome"]] += fact["rollouts"]
    return dict(sorted(found.items()))


def _evaluation(store: Store, policy_version: int) -> dict[str, Any] | None:
    try:
        result: dict[str, Any] = json.loads(bytes(store.get(layout.evaluation(policy_version))))
    except NotInStore:
        return None
    return result
