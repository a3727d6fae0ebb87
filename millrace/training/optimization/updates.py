"""Which samples each optimizer update of a batch takes.

    batch, by groups ─► epoch 1: shuffled, cut into minibatches ─► one update each ─► epoch 2: shuffled again ─► …

A group stays whole, because its advantages belong together. The order follows from the run's seed and the policy
version that the batch makes. So a trainer that repeats the batch, and a replay, make the same updates.
"""

from collections.abc import Sequence

import numpy as np

from millrace.training.batch import Sample


def updates(
    samples: Sequence[Sample], *, minibatches: int, epochs: int, seed: int, policy_version: int
) -> list[list[int]]:
    """The indices of the samples of each update, ascending; at least one update.

    `policy_version` is the one that the batch makes. Minibatches differ by at most one group; there are fewer of them
    if fewer groups carry loss. Groups without a token that carries loss are in no minibatch, unless it is the batch.
    """
    carrying = sorted({sample.group for sample in samples if sample.loss_mask.any()})
    if minibatches == 1 or not carrying:
        return [list(range(len(samples))) for _ in range(epochs)]
    found = []
    for epoch in range(epochs):
        order = np.random.default_rng([seed, policy_version, epoch]).permutation(carrying)
        for part in np.array_split(order, min(minibatches, len(carrying))):
            groups = set(part.tolist())
            found.append([place for place, sample in enumerate(samples) if sample.group in groups])
    return found
