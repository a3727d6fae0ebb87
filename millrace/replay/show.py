"""What the trainer saw at one step of a stored run: `millrace show RUN_URL --step N`.

    ║ consumed ║ ─► the rows of step N ─► ║ trajectories ║ + ║ scores ║ ─► groups of the batch ┐
    ║ trainer_logprobs ║ − log μ ─────────────────────────────────────────► importance ratios  ├─► Shown
    attempts/, ║ metrics ║, evaluations/ ─────────────────────────────────► config, numbers    ┘

Step N makes policy version N, so the policy that saw the batch is version N − 1.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.errors import ReplayError
from millrace.evaluation.results import read_result
from millrace.replay.source_run import SourceRun
from millrace.replay.trained_group import TrainedGroup, prompts, trained_groups
from millrace.rollouts.consumed import TRAINED
from millrace.runs.history import read_steps
from millrace.runs.record import attempt_of_step
from millrace.types import Prompt
from storage.stores.base import Store


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """π/μ over the tokens that carry loss, before clipping."""

    mean: float
    p05: float
    """Quantiles 0.05, 0.5 and 0.95."""
    p50: float
    p95: float
    max: float


@dataclass(frozen=True, kw_only=True)
class ShownGroup:
    """One group of the batch; lists have one value per member."""

    group_id: int
    generator: int
    first_row_id: int
    """Of its rows in the generator's stream."""
    prompt_id: str
    prompt: str
    """Its text, as tokenised."""
    answer: str
    """The correct one."""
    min_policy_version: int
    max_policy_version: int
    """Oldest and newest policy version that sampled any of it."""
    staleness: int
    """Policy versions, when it was trained."""
    rewards: list[float | None]
    """None where the verifier failed; such a member was not trained on."""
    advantages: list[float | None]
    """None where it was not trained on."""
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
    """The controller's start during which it was made."""
    config: dict[str, Any]
    """In effect then, as JSON."""
    groups: list[ShownGroup]
    """In the order of the batch."""
    dropped: dict[str, int]
    """Trajectories dropped before this step, by reason."""
    ratios: Ratios
    """Over the whole batch."""
    measured: dict[str, float]
    """The trainer's metrics by name: loss, grad_norm, …; empty if they are damaged."""
    evaluation: dict[str, Any] | None
    """Held-out result of the version that it made; None if it was not evaluated."""
    dashboard: str | None
    """Address of its trajectories in the dashboard; None if the dashboard's address is not known."""

    @property
    def staleness(self) -> dict[int, int]:
        """Groups by staleness, ascending."""
        return dict(sorted(Counter(group.staleness for group in self.groups).items()))


def show(store: Store, step: int, *, dashboard_url: str | None = None) -> Shown:
    """Step `step` of the run in `store`. `dashboard_url` is the dashboard's address.

    Raises RunMissing, ReplayError if the run has no such step or stored too little, and StreamCorrupt or PartRemoved if
    what it stored can no longer be read.
    """
    run = SourceRun(store)
    if step not in run.steps:
        raise ReplayError(f"{run.url}: no step {step}; expected one of {run.steps[0]} to {run.steps[-1]}")
    of_step = np.flatnonzero(run.groups["step"].to_numpy() == step)
    facts = run.groups.take(of_step).to_pylist()
    batch = run.batch(step).tolist()
    staleness = run.groups["staleness"].to_numpy()[batch].tolist()
    logprobs, advantages = iter(run.trainer_logprobs(step)), iter(run.advantages(step))
    groups, ratios = [], []
    for found, prompt, lag in zip(trained_groups(run, batch), prompts(run, batch), staleness, strict=True):
        ratios.append(_ratios(found, logprobs))
        groups.append(_shown(found, prompt, lag, advantages, ratios[-1]))
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
        evaluation=read_result(store, step),
        dashboard=dashboard_url and f"{dashboard_url.rstrip('/')}/run/{run.run_id}/trajectories?version={step}",
    )


def _ratios(found: TrainedGroup, logprobs: Iterator[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """[N] π/μ of the group's tokens that carry loss, in the trainer's precision."""
    old, mask = found.group.rollout_logprobs, found.group.loss_mask
    return np.concatenate([np.exp(next(logprobs) - old[i])[mask[i].astype(bool)] for i in found.trained])


def _shown(
    found: TrainedGroup, prompt: Prompt, staleness: int, advantages: Iterator[float], ratios: npt.NDArray[np.float32]
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
