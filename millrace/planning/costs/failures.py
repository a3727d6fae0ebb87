"""What failures of the trainer's GPUs cost on average: recoveries, and the steps since the last checkpoint."""

import math

from millrace.planning.costs.assumptions import Assumptions
from millrace.planning.simulation.faults import Faults


def trainer_faults(gpus: int, assumptions: Assumptions) -> Faults:
    """Of a trainer with so many GPUs. One that fails ends it."""
    return Faults(trainer_mtbf=assumptions.gpu_mtbf / gpus, trainer_recovery=assumptions.restart_seconds)


def share_lost(step_seconds: float, checkpoint_every: int, faults: Faults) -> float:
    """Share of all time that a trainer's failures take.

    Failures are a Poisson process. To get through w seconds of steps without one takes (mtbf + recovery) ·
    (exp(w / mtbf) − 1) seconds on average, if each failure begins them again.
    """
    work = step_seconds * checkpoint_every
    taken = (faults.trainer_mtbf + faults.trainer_recovery) * math.expm1(work / faults.trainer_mtbf)
    return 1 - work / taken
