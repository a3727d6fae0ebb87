"""The staleness bound and the generators' places of one trainer, from step to step.

    step ─► readings of trainer and generators ─► rule ─► decisions/<n>.json ─► terms of the next version
                                                                                   └─► with its weights to generators

With a fixed bound nothing is decided, and all versions have the same terms. Everything that the trainer needs to go on
is in its checkpoints; the readings of the steps since the last decision are not, and are taken anew.
"""

import time
from collections.abc import Mapping
from typing import Any

from configs.learning.staleness import StalenessConfig
from configs.schema import GenerationConfig
from millrace.control.bounds import Bounds
from millrace.control.decisions import Decisions
from millrace.control.measured import Reading
from millrace.control.rule import Decision, Limits, Rule
from millrace.runs.decisions import StoredDecision
from millrace.weights.base import AdmissionPolicy
from storage.progress import read_status
from storage.stores.base import Store


class StalenessController:
    """Decides for the trainer `incarnation`. `state` is that of the checkpoint it starts from, if there is one.

    `fixed` are the terms with a fixed bound, and with an adaptive one the most that it may come to.
    """

    def __init__(
        self,
        store: Store,
        staleness: StalenessConfig,
        generation: GenerationConfig,
        decisions: Decisions,
        fixed: AdmissionPolicy,
        *,
        groups_per_step: int,
        incarnation: int,
        state: Mapping[str, Any] | None,
    ) -> None:
        self._store, self._decisions = store, decisions
        self._incarnation = incarnation
        self._num_generators = generation.replicas
        self._started = time.monotonic()
        self._fixed = fixed
        self._rule: Rule | None = None
        self._on_policy_ess: float | None = None
        self.bounds = Bounds([(0, fixed.max_staleness)])
        if staleness.control == "adaptive":
            limits = Limits.of(staleness, generation, groups_per_step=groups_per_step, max_places=fixed.places)
            found = state or {}
            self._rule = Rule.from_json(found["rule"], limits) if "rule" in found else Rule.start(limits)
            self._on_policy_ess = found.get("on_policy_ess")
            self.bounds = Bounds(found.get("bounds", [(0, self._rule.max_staleness)]))

    def bound_at(self, trainer_version: int) -> int:
        """The bound in force when a trainer at this version takes a group, policy versions."""
        return trainer_version - self.bounds.oldest_trainable(trainer_version)

    def terms(self, version: int) -> AdmissionPolicy:
        """What generators may do under the weights of `version`."""
        bound = self.bounds.in_force(version)
        places = self._fixed.places if self._rule is None else self._rule.places
        return AdmissionPolicy(max_staleness=bound, places=places)

    def step(
        self, version: int, *, effective_sample_size: float, length_ratio: float, steps_ready: float, waited: float
    ) -> Decision | None:
        """Takes what the step that made `version` measured, and fixes the terms of the version after it.

        `effective_sample_size` is of the ratios π/μ before any clipping, `steps_ready` the scored groups left behind in
        steps' worth, and `waited` the seconds that the trainer has waited for groups so far. Returns what changes, once
        it is stored. Raises Fenced if another trainer decides for this run.
        """
        if self._rule is None:
            return None
        if self._on_policy_ess is None:
            # The rollouts of the first step are all of the policy that it trains.
            self._on_policy_ess = effective_sample_size or 1.0 if version == 1 else 1.0
        idle, seconds = self._generators()
        reading = Reading(
            effective_sample_size=min(1.0, effective_sample_size / self._on_policy_ess),
            length_ratio=length_ratio,
            steps_ready=steps_ready,
            trainer_waited=waited,
            trainer_seconds=time.monotonic() - self._started,
            generators_waited=idle,
            generators_seconds=seconds,
        )
        decision = self._rule.step(reading, version)
        if decision is not None:
            self._decisions.add(
                StoredDecision(
                    t=time.time(),
                    incarnation=self._incarnation,
                    policy_version=version,
                    action=decision.action,
                    max_staleness=decision.max_staleness,
                    places=decision.places,
                    reason=decision.reason,
                    measured=decision.measured,
                )
            )
        self.bounds.move(version + 1, self._rule.max_staleness)
        self.bounds.forget(version)
        return decision

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        if self._rule is None:
            return {}
        return {
            "bounds": self.bounds.to_json(),
            "rule": self._rule.to_json(),
            "on_policy_ess": self._on_policy_ess,
        }

    def _generators(self) -> tuple[float, float]:
        """Seconds that all generators have waited so far, and seconds that they have lived.

        While a straggler is on its way a generator is at work, and most of its places may be free for want of room.
        Such a time counts as waiting by the share of these places.
        """
        records = [
            record
            for generator in range(self._num_generators)
            if (record := read_status(self._store, "generate", generator))
        ]
        seconds = [record.get("seconds", {}) for record in records]
        starved = sum(record.get("starved_ms", 0) for record in records) / 1000
        return starved + sum(one.get("idle", 0.0) for one in seconds), sum(sum(one.values()) for one in seconds)
