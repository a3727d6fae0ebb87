"""The staleness bound and the places by policy version: fixed, or moved by the product's own rule.

step ─► what it measured ─► rule ─► bound and places of the version after it ─► generators, with its weights
"""

from configs.schema import RunConfig
from millrace.control.bounds import Bounds
from millrace.control.measured import Reading
from millrace.control.rule import Limits, Rule
from millrace.weights.base import AdmissionPolicy


class Control:
    """Of one campaign, before its first step; `places` are a generator's, at most."""

    def __init__(self, config: RunConfig, places: int) -> None:
        self._rule: Rule | None = None
        bound = config.effective_max_staleness
        if config.staleness.control == "adaptive":
            groups = config.training.groups_per_step
            limits = Limits.of(config.staleness, config.generation, groups_per_step=groups, max_places=places)
            self._rule = Rule.start(limits)
            bound = self._rule.max_staleness
        self._bounds = Bounds([(0, bound)])
        self._places = places
        # By version; the ones before the oldest that generators may hold are kept too, for they are few bytes.
        self._terms = [self._terms_of(0), self._terms_of(1)]

    def terms(self, policy_version: int) -> AdmissionPolicy:
        """What generators may do under the weights of a version."""
        return self._terms[policy_version]

    def bound_at(self, trainer_version: int) -> int:
        """The bound in force when a trainer at this version takes a group, policy versions."""
        return trainer_version - self._bounds.oldest_trainable(trainer_version)

    def step(self, version: int, reading: Reading) -> None:
        """Takes what the step that made `version` measured, and fixes the terms of the version after it."""
        if self._rule is not None:
            self._rule.step(reading, version)
            self._bounds.move(version + 1, self._rule.max_staleness)
            self._bounds.forget(version)
        self._terms.append(self._terms_of(version + 1))

    def _terms_of(self, version: int) -> AdmissionPolicy:
        places = self._places if self._rule is None else self._rule.places
        return AdmissionPolicy(max_staleness=self._bounds.in_force(version), places=places)
