"""The staleness bound: how far trajectories may lag behind the trainer.

Groups are numbered 0, 1, 2 … in the order in which a run admits them to generation. A generator holding weights of
version v admits group n while

    n < groups_dropped + (max_staleness + v + 1) · groups_per_step

so at most (max_staleness + 1) · groups_per_step groups are on their way to the trainer, which takes `groups_per_step`
of them per step, oldest weights first (AReaL, arXiv 2505.24298, §5.1). With one generator, whose groups arrive in
order, that bounds the staleness of every group. With several, the groups of a slow one can be overtaken, and so can
long responses: the trainer checks the bound again when it consumes a group, and treats a group that breaks it as
`staleness.too_old` says. With `keep` it doesn't check, and the bound holds for the mean: if no group is dropped, the
mean staleness of all groups trained so far is at most `max_staleness`, however they overtake each other.
"""

TOKENS_OF_STALENESS = "trained_tokens_of_staleness/"
"""Prefix of step metrics: trainable tokens by the staleness of the version that sampled each."""


def admission_limit(policy_version: int, *, max_staleness: int, groups_per_step: int, groups_dropped: int) -> int:
    """Returns the first group number that may not be admitted yet.

    `policy_version` is that of the generator's weights. `groups_dropped` counts the groups that the trainer consumed
    and did not train on: each makes room for another.
    """
    return groups_dropped + (max_staleness + policy_version + 1) * groups_per_step


def max_in_flight(*, by_step: bool, groups_per_step: int, groups_per_batch: int, group_size: int) -> int:
    """Maximum number of requests that a generator has in flight. `by_step`: whether the run is in sync mode."""
    # In sync mode only the staleness bound limits it: all groups of a step are decoded together.
    return (groups_per_step if by_step else groups_per_batch) * group_size


def consumption_order(min_policy_version: int, group_id: int) -> tuple[int, int]:
    """Sort key of scored groups: a trainer takes the group with the oldest weights first, then by group number."""
    return min_policy_version, group_id


def staleness(trainer_version: int, min_policy_version: int) -> int:
    """Optimizer steps between the oldest weights that sampled a trajectory and the weights that it will update."""
    return trainer_version - min_policy_version


def oldest_trainable(trainer_version: int, max_staleness: int) -> int:
    """Oldest policy version whose tokens are trainable when a trainer at `trainer_version` takes their group."""
    return trainer_version - max_staleness


def is_too_old(policy_version: int, trainer_version: int, max_staleness: int) -> bool:
    """Whether a group is too old for a trainer at `trainer_version`. `policy_version`: its oldest trainable version."""
    return policy_version < oldest_trainable(trainer_version, max_staleness)


def step_leaves_too_old(policy_version: int, trainer_version: int, max_staleness: int) -> bool:
    """Whether a group of this oldest trainable version would be too old if it is taken after the next step."""
    return is_too_old(policy_version, trainer_version + 1, max_staleness)
