"""The stream `consumed` as a trainer writes it, from the rewards of each group."""

from collections.abc import Mapping, Sequence

import numpy as np
from support.streams.scored_groups import scored_group

from millrace.rollouts.consumed import ConsumedWriter
from storage.stores.base import Store

Rewards = Mapping[int, Sequence[float | None]]


def consume(
    store: Store,
    version: int,
    trained: Rewards,
    *,
    dropped: Rewards | None = None,
    reason: str = "zero_advantage",
    incarnation: int = 0,
) -> None:
    """The step that made `version`: it trained some groups and dropped others for `reason`, by their numbers."""
    writer = ConsumedWriter(store, incarnation)
    for number, rewards in (dropped or {}).items():
        writer.drop(scored_group(number, [[0]] * len(rewards), rewards), reason, version - 1)
    groups = [scored_group(number, [[0]] * len(rewards), rewards) for number, rewards in trained.items()]
    known = sum(len(group.trained) for group in groups)
    writer.step(version, groups, [0.0] * known, [np.zeros(1, dtype=np.float32)] * known)
    writer.close()
