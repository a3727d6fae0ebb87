"""The staleness bound: how far trajectories may lag behind the trainer.

Groups are numbered 0, 1, 2 … in the order in which a run admits them to generation. A generator holding weights of
version v admits group n while

    n < groups_dropped + (max_staleness + v + 1) · groups_per_step

so at most (max_staleness + 1) · groups_per_step groups are on their way to the trainer, which takes `groups_per_step`
of them per step, oldest weights first (AReaL, arXiv 2505.24298, §5.1). With one generator, whose groups arrive in
order, that bounds the staleness of every group. With several, the groups of a slow one can be overtaken: the trainer
checks the bound again when it consumes a group, and drops and counts a group that breaks it.
"""


def admission_limit(policy_version: int, *, max_staleness: int, groups_per_step: int, groups_dropped: int) -> int:
    """The first group number that may not be admitted yet.

    `policy_version` is that of the generator's weights. `groups_dropped` counts the groups that the trainer consumed
    and did not train on: each makes room for another.
    """
    return groups_dropped + (max_staleness + policy_version + 1) * groups_per_step


def staleness(trainer_version: int, min_policy_version: int) -> int:
    """Optimizer steps between the oldest weights that sampled a trajectory and those that it is about to update."""
    return trainer_version - min_policy_version
