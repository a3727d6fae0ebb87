"""What all generators of a simulation have in common: their limits, their costs, and what they report."""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from configs.schema import RunConfig
from millrace.planning.simulation.control import Control
from millrace.planning.simulation.costs import Costs, DecodeRates
from millrace.planning.simulation.figures import FreePlaces
from millrace.planning.simulation.group import Group
from millrace.planning.simulation.lengths import Lengths
from millrace.rollouts.staleness import admission_limit, generator_places

AT_ONCE = 1e-7
"""What is closer together, seconds, is at once: times are sums of rounded numbers."""
_SAMPLED_GROUPS = 64
"""Groups whose lengths tell how large a key-value cache is going to be."""


class Shared:
    """Of one campaign."""

    def __init__(self, config: RunConfig, costs: Costs, lengths: Lengths, slots: int | None) -> None:
        self.num_generators = config.generation.replicas
        self.group_size = config.generation.group_size
        self.places = generator_places(
            by_step=config.pipeline.mode == "sync",
            groups_per_step=config.training.groups_per_step,
            groups_per_batch=config.generation.groups_per_batch,
            group_size=self.group_size,
        )
        """Requests that a generator has in flight, at most."""
        self.control = Control(config, self.places)
        self.slots = self.places if slots is None else min(slots, self.places)
        """Requests that its engine decodes at once."""
        self.of_group = lengths.of_group
        self._expected_tokens = self.slots * _tokens_in_flight(lengths)
        self.charge(costs)
        self.groups_dropped = 0
        """By the trainer, so far."""
        self.finished: list[tuple[float, Group]] = []
        """(time, group) of what became whole; of one generator in order."""
        self.unready: dict[int, int] = {}
        """Policy version → how many groups of it are admitted and not scored yet."""
        self.admitted_later: list[tuple[float, int, int]] = []
        """(time, version, groups) of what counts as unready, but is admitted only when weights are loaded."""
        self.admitted: list[tuple[float, Group]] | None = None
        """(time, group) of what was admitted, if it is asked for; of one generator in order."""
        self.free_places = FreePlaces(exact=costs.cores is not None)
        """Of all of them."""
        self._groups_per_step = config.training.groups_per_step

    def charge(self, costs: Costs) -> None:
        """What generators do takes as long as these say from now on; what they have begun may still go on as before."""
        self.pause = costs.pause
        self.group_rows = costs.rollout * self.group_size
        """How long a generator makes rows of a whole group, seconds."""
        self.prefill = lru_cache(maxsize=1 << 16)(costs.prefill)
        self.recompute = costs.recompute or self.prefill
        self.pads, self.collect = costs.pads, costs.collect
        self.rates = DecodeRates(costs.decode, self._expected_tokens, self.slots)

    def in_flight(self, t: float) -> Iterable[int]:
        """Versions under which groups were admitted that are not scored yet; `t` does not decrease."""
        self.admitted_later = [one for one in self.admitted_later if one[0] > t]
        in_flight = Counter(self.unready)
        for _, version, num_groups in self.admitted_later:
            in_flight[version] -= num_groups
        return (+in_flight).keys()

    def limit(self, policy_version: int) -> int:
        """As `admission_limit`."""
        return admission_limit(
            policy_version,
            max_staleness=self.control.terms(policy_version).max_staleness,
            groups_per_step=self._groups_per_step,
            groups_dropped=self.groups_dropped,
        )


def _tokens_in_flight(lengths: Lengths) -> float:
    """Expected tokens of a request in flight."""
    groups = [lengths.of_group(number) for number in range(_SAMPLED_GROUPS)]
    tokens = [prompt + one / 2 for prompt, responses in groups for one in responses]
    return sum(tokens) / len(tokens)
