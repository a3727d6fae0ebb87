"""The view of the trainer at one step of a stored run: `millrace show RUN_URL --step N`.

    ║ consumed ║ ─► the rows of step N ─► ║ trajectories ║ + ║ scores ║ ─► groups of the batch ┐
    ║ trainer_logprobs ║ − log μ ─────────────────────────────────────────► importance ratios  ├─► the step
    attempts/, ║ metrics ║, evaluations/ ─────────────────────────────────► config, numbers    ┘

Step N makes policy version N, so the policy that saw the batch is version N − 1.
"""

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.evaluation.results import read_result
from millrace.replay.source_run import open_run_or_replay
from millrace.rollouts.arrow import prompt_of
from millrace.rollouts.consumed import TRAINED
from millrace.runs.record import attempt_of_step
from storage.stores.base import Store


def show(store: Store, step: int, *, dashboard_url: str | None = None) -> dict[str, Any]:
    """Step `step` of the run in `store`, its batch and its results, as plain JSON.

    `groups` in the order of the batch, their lists with one value per member: `rewards` are None where the verifier
    failed, `advantages` where a member was not trained on, `response_tokens` are ids, which `lengths` count.
    `ratios`: π/μ over the trainable tokens, before clipping. `dropped`: trajectories dropped before this step, by
    reason. `measured`: the trainer's metrics by name, empty if they are damaged. `evaluation`: the held-out result of
    the version that it made. `dashboard`: the address of its trajectories there, if `dashboard_url` is known.

    Raises RunMissing, ReplayError if the run has no such step or stored too little, and StreamCorrupt or PartRemoved if
    its data can no longer be read.
    """
    run = open_run_or_replay(store, step)
    rows = run.groups.to_pylist()
    dropped: Counter[str] = Counter()
    for row in rows:
        if row["outcome"] != TRAINED:
            dropped[row["outcome"]] += row["rollouts"]
    (trained,) = run.read_trained([step])
    groups, ratios = [], []
    for row, group in zip(run.batch(step).tolist(), trained.groups, strict=True):
        keys = [(group.group_id, member) for member in range(len(group.rewards))]
        members = zip(keys, group.rollout_logprobs, group.loss_mask, strict=True)
        logprobs = trained.trainer_logprobs
        ratios.append(
            np.concatenate([np.exp(logprobs[key] - old)[mask > 0] for key, old, mask in members if key in logprobs])
        )
        prompt = prompt_of(group.prompt_id, group.meta)
        groups.append(
            {
                "group_id": group.group_id,
                "source": group.source,
                "generator": group.generator,
                "first_row_id": group.first_row_id,
                "prompt_id": prompt.prompt_id,
                "prompt": prompt.text,
                "answer": prompt.answer,
                "min_policy_version": group.min_policy_version,
                "max_policy_version": group.max_policy_version,
                "staleness": run.groups["staleness"][row].as_py(),
                "rewards": group.rewards,
                "advantages": [trained.advantages.get(key) for key in keys],
                "response_tokens": [tokens.tolist() for tokens in group.response_tokens],
                "lengths": [len(tokens) for tokens in group.response_tokens],
                "ratios": _summarize(ratios[-1]),
            }
        )
    attempt = attempt_of_step(store, step)
    return {
        "run_id": run.run_id,
        "run_url": run.url,
        "step": step,
        "incarnation": rows[0]["incarnation"],
        "t": rows[0]["t"],
        "attempt": attempt.number,
        "config": attempt.config,
        "groups": groups,
        "dropped": dict(sorted(dropped.items())),
        "ratios": _summarize(np.concatenate(ratios)),
        "measured": trained.numbers,
        "evaluation": read_result(store, step),
        "dashboard": dashboard_url and f"{dashboard_url.rstrip('/')}/run/{run.run_id}/trajectories?version={step}",
    }


def _summarize(ratios: npt.NDArray[np.float32]) -> dict[str, float]:
    p05, p50, p95 = np.quantile(ratios, (0.05, 0.5, 0.95)).tolist()
    return {"mean": float(ratios.mean()), "p05": p05, "p50": p50, "p95": p95, "max": float(ratios.max())}
