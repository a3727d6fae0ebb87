"""How far rollouts may lag behind the trainer, and how that bound is kept.

Groups are numbered 0, 1, 2 … in the order in which a run admits them to generation. A generator holding weights of
version v admits group n while

    n < groups_dropped + (max_staleness + v + 1) · groups_per_step

so that at most (max_staleness + 1) · groups_per_step groups are ever on their way to the trainer, which takes
`groups_per_step` of them a step, oldest weights first (AReaL, arXiv 2505.24298, §5.1). With one generator, whose
groups arrive in order, that bounds the staleness of every group. With several, a slow one's groups can be overtaken:
so the trainer checks the bound again when it consumes a group, and drops and counts one that breaks it.
"""


def admission_limit(policy_version: int, *, max_staleness: int, groups_per_step: int, groups_dropped: int) -> int:
    """The first group number that may not be admitted yet.

    `policy_version` is that of the weights the generator holds; `groups_dropped` are the groups that the trainer took
    from its streams and did not train on: each of them frees a place.
    """
    return groups_dropped + (max_staleness + policy_version + 1) * groups_per_step


def staleness(trainer_version: int, min_policy_version: int) -> int:
    """Optimizer steps between the oldest weights that sampled a trajectory and those about to be updated with it."""
    return trainer_version - min_policy_version
