"""Settings of weight sync that are valid alone but not together."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.schema import RunConfig


def weight_combinations(config: RunConfig) -> Iterator[str]:
    """Yield one sentence for each pair of settings that `direct` can't serve."""
    if config.weights.transport != "direct":
        return
    # A push that waits for a frozen generator reports no progress.
    deadline, hang = config.weights.deadline_seconds, config.supervision.hang_seconds
    if deadline >= hang:
        yield (
            f"weights.deadline_seconds is {deadline:g} and supervision.hang_seconds is {hang:g}; "
            "expected a shorter deadline, or sync_weights would count as hung while it waits for a generator"
        )
    where, host = config.placement.train, config.weights.host
    if where.hosts > 1 and where.network is not None and "/" not in host and not IPv4Network(where.network).is_loopback:
        yield (
            f"placement.train.hosts is {where.hosts} and weights.host is {host}; expected a network such as "
            f"{where.network}, because sync_weights may run on any of these hosts"
        )
