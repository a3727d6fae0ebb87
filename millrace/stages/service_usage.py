"""Counts requests to services by a process that scores, and by its predecessors, in its status record.

It is stored before requests are made, so that those of a killed process count.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from millrace.rewards.scorer import Scorer
from millrace.rewards.services.meter import LimitReached, Usage
from millrace.rewards.services.remote import RemoteReward
from millrace.runtime.stage import Stage

_COUNTS = ("requests", "input_tokens", "output_tokens")
_NOTHING: Mapping[RemoteReward, int] = MappingProxyType({})


class ServiceUsage:
    """Usage by the rewards of `scorer` that services compute. Counts continue from the stage's record.

    The limits of a source are shared by the scorers of its pool and the evaluator.
    """

    def __init__(self, stage: Stage, scorer: Scorer) -> None:
        self._remote = scorer.remote
        pools = stage.config.annotators
        for remote in self._remote:
            usage = Usage(**{count: stage.value(f"{_key(remote)}/{count}") for count in _COUNTS})
            pool = pools.of_source("scores", remote.source)
            assert pool is not None, "every source has scorers"
            remote.endpoint.meter.begin(usage, pools.replicas[pool] + 1)

    def values(self, in_flight: Mapping[RemoteReward, int] = _NOTHING) -> dict[str, Any]:
        """For the status record; `in_flight` is the number of requests that were or will be made before the next look.

        Those are counted with the mean number of tokens so far.
        """
        values: dict[str, Any] = {}
        for remote in self._remote:
            usage, more = remote.endpoint.meter.usage, in_flight.get(remote, 0)
            counted = Usage(
                requests=usage.requests + more,
                input_tokens=usage.input_tokens + more * usage.input_tokens // max(1, usage.requests),
                output_tokens=usage.output_tokens + more * usage.output_tokens // max(1, usage.requests),
            )
            values |= {f"{_key(remote)}/{count}": getattr(counted, count) for count in _COUNTS}
            values[f"{_key(remote)}/cost"] = remote.endpoint.meter.prices.cost(counted)
        return values


def pause_at_limit(stage: Stage, error: LimitReached) -> None:
    """Waits until the stage is asked to drain, if the service whose limit is reached says so; otherwise raises."""
    if not error.pauses:
        raise error
    stage.log(f"paused: {error}")
    stage.emit_event("service.limit-reached", sentence=str(error))
    stage.wait(lambda: False, why="paused at a service's limit")


def _key(remote: RemoteReward) -> str:
    return f"service/{remote.source}/{remote.name}"
