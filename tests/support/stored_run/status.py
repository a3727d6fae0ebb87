"""Status records of a generated run, as its stages would have written them at the end of a step."""

import time
from collections.abc import Mapping, Sequence

from support.stored_run.metrics import stage_seconds

from millrace.rollouts.ledger import Account, Amount

STEP_SECONDS = 1.0
"""Steps are evenly spaced."""


def status_record(stage: str, *, doing: str, steps: int, incarnation: int, account: Account) -> dict[str, object]:
    """Of a stage replica that writes it now, after `steps` steps."""
    return {
        "attempt": 0,
        "doing": doing,
        "pid": 1,
        "t": time.time(),
        "policy_version": steps,
        "incarnation": incarnation,
        "seconds": stage_seconds(stage, steps),
        "tokens": account.taken().tokens,
        "rollouts": account.taken().rollouts,
    }


def of_the_trainer(
    *, account: Account, consumed: Sequence[Amount], measured: Mapping[str, float], max_steps: int, t_training: float
) -> dict[str, object]:
    """What the trainer's record has besides; `t_training` are the seconds that it has trained."""
    return {
        "tokens": account.trained.tokens,
        "rollouts": account.trained.rollouts,
        "groups_dropped": account.groups_dropped,
        "max_steps": max_steps,
        "step_seconds": STEP_SECONDS,
        "tokens_per_second": account.trained.tokens / t_training if t_training else 0.0,
        "account": account.to_json(),
        "consumed": [amount.to_json() for amount in consumed],
        "reward_mean": measured.get("reward_mean"),
        "staleness_mean": measured.get("staleness_mean"),
        "step": dict(measured) or None,
    }
