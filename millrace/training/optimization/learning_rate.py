"""The learning rate of each step: a pure function of the policy version, and of nothing that a checkpoint would hold.

    share of the full rate
    1   ┤      ╭───╮
        │    ╱      ╲                 warm-up: w steps, each a (w + 1)th more than the one before
        │  ╱          ╲               decay: from the full rate at step w + 1 to the final share after `steps`
    f   ┤╱              ╰────────     all later steps: the final share
        └┬────┬─────────┬────────► step = policy version that it makes, from 1
         1    w       steps

With `ess_scaling` an update's rate is also multiplied by √ESS of its importance ratios.
"""

from math import cos, pi, sqrt

import numpy as np
import numpy.typing as npt

from configs.training import ScheduleConfig, TrainingConfig
from millrace.training.losses.offpolicy import effective_sample_size


def share_of_rate(schedule: ScheduleConfig, step: int) -> float:
    """Share of the full rate in the step that makes policy version `step`, in [0, 1]."""
    warmup = schedule.warmup_steps
    if step <= warmup:
        return step / (warmup + 1)
    if schedule.decay == "constant" or schedule.steps is None:
        return 1.0
    progress = min(1.0, (step - 1 - warmup) / (schedule.steps - warmup))
    left = 1 - progress if schedule.decay == "linear" else (1 + cos(pi * progress)) / 2
    return schedule.final_share + (1 - schedule.final_share) * left


def planned_rate(training: TrainingConfig, step: int) -> float:
    """Learning rate of the step that makes policy version `step`, before √ESS and without rollbacks."""
    return training.learning_rate * share_of_rate(training.schedule, step)


def ess_factor(log_ratio_N: npt.NDArray[np.float64]) -> float:
    """√ESS of the ratios π/μ of N ≥ 1 tokens, given their logarithms; in [0, 1], and 1 if π is μ.

    VCPO, arXiv 2602.17616. There the ratios are those of whole responses; here of tokens, as most losses weigh tokens.
    """
    # The ESS does not depend on the ratios' scale, and so none of them overflows.
    return sqrt(effective_sample_size(np.exp(log_ratio_N - log_ratio_N.max())))
