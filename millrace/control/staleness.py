"""The staleness bound of one trainer, from version to version.

    step ─► readings of trainer and generators ─► rule ─► decisions/<n>.json ─► bound of the next version
                                                                                   └─► with its weights to generators

    version      0  1  2  3  4  5  6  7  8           bound 1 at first, raised to 4 at version 2,
    bound b      1  1  4  4  3  2  1  1  1           lowered to 1 at version 4
    v + b(v)     1  2  6  7  7  7  7  8  9           tokens of version v may be trained by a trainer up to this version

A token of version v may be trained while the trainer's version is at most v + b(v): the bound of a token is the one
that was in force when it could be sampled. A generator that holds version v admits groups by b(v), so the argument in
`millrace.rollouts.staleness` holds for each version alone. A bound falls by at most one per version. So v + b(v) never
falls: nothing that was admitted becomes too old because the bound fell, and while it falls nothing is admitted.

With a fixed bound nothing is decided, and all versions have the same bound. A checkpoint holds the bounds and what the
rule rejected; the readings since the last decision are taken again.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from configs.operation import StalenessConfig
from millrace.control.rule import Decision, Reading, StalenessRule
from millrace.runs.decisions import Decisions, StoredDecision
from storage.progress import read_status
from storage.stores.base import Store


class Bounds:
    """Bounds by version. `changes` are (version, bound) pairs in order: each bound holds from its version on."""

    def __init__(self, changes: Sequence[Sequence[int]]) -> None:
        self.changes = [(int(version), int(bound)) for version, bound in changes]

    def in_force(self, version: int) -> int:
        """Returns the bound at a version, policy versions."""
        return next((bound for since, bound in reversed(self.changes) if since <= version), self.changes[0][1])

    def move(self, version: int, target: int) -> None:
        """Decides the bound of `version`, the newest so far, on the way to `target`."""
        last = self.in_force(version - 1) if version > 0 else target
        bound = max(target, last - 1)
        if bound != self.changes[-1][1]:
            self.changes.append((version, bound))

    def oldest_trainable(self, trainer_version: int) -> int:
        """Returns the oldest version whose tokens a trainer at this version may train."""
        version = trainer_version
        while version > 0 and version - 1 + self.in_force(version - 1) >= trainer_version:
            version -= 1
        return version


class StalenessController:
    """Decides for the trainer `incarnation` of a run, by what trainer and generators measure, and stores decisions.

    `max_staleness` is the bound of a run with a fixed bound. `state` is in the checkpoint that the trainer starts from,
    None without one.
    """

    def __init__(
        self,
        store: Store,
        staleness: StalenessConfig,
        num_generators: int,
        decisions: Decisions,
        max_staleness: int,
        *,
        incarnation: int,
        state: Mapping[str, Any] | None,
    ) -> None:
        self._store, self._decisions = store, decisions
        self._incarnation = incarnation
        self._num_generators = num_generators
        self._started = time.monotonic()
        self._on_policy_ess: float | None = None
        self._rule: StalenessRule | None = None
        self._bounds = Bounds([(0, max_staleness)])
        if staleness.control == "adaptive" and state:
            self._rule = StalenessRule.from_json(state["rule"], staleness)
            self._bounds = Bounds(state["bounds"])
            self._on_policy_ess = state["on_policy_ess"]
        elif staleness.control == "adaptive":
            self._rule = StalenessRule(limits=staleness, bound=staleness.min_staleness)
            self._bounds = Bounds([(0, self._rule.bound)])

    def bound_at(self, trainer_version: int) -> int:
        """Returns the bound in force when a trainer at this version takes a group, policy versions."""
        return trainer_version - self._bounds.oldest_trainable(trainer_version)

    def bound_of(self, version: int) -> int:
        """Returns the bound by which generators with the weights of `version` admit groups, policy versions."""
        return self._bounds.in_force(version)

    def decide(
        self, version: int, *, effective_sample_size: float, length_ratio: float, steps_ready: float, waited: float
    ) -> Decision | None:
        """Takes the measurements of the step that made `version`, and decides the bound of the version after it.

        `effective_sample_size` is of the ratios π/μ before any clipping, `steps_ready` the scored groups left behind in
        steps' worth, and `waited` the seconds that the trainer has waited for groups so far. Returns what changes, once
        it is stored. Raises Fenced if another trainer decides for this run.
        """
        if self._rule is None:
            return None
        if self._on_policy_ess is None:
            # The rollouts of the first step are all of the policy that it trains.
            self._on_policy_ess = effective_sample_size or 1.0 if version == 1 else 1.0
        idle, seconds = self._generator_seconds()
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
        self._bounds.move(version + 1, self._rule.bound)
        if decision is not None:
            stored = StoredDecision(
                t=time.time(), incarnation=self._incarnation, policy_version=version, **vars(decision)
            )
            self._decisions.add(stored)
        return decision

    def state(self) -> dict[str, Any]:
        """Returns JSON for a checkpoint."""
        if self._rule is None:
            return {}
        return {
            "bounds": [list(change) for change in self._bounds.changes],
            "rule": self._rule.to_json(),
            "on_policy_ess": self._on_policy_ess,
        }

    def _generator_seconds(self) -> tuple[float, float]:
        """Sums the seconds that all generators have waited so far, and the seconds that they have lived.

        While a generator waits for a straggler, most of its slots may be free because the bound admits no group. That
        time counts as waiting, by the share of free slots.
        """
        waited, lived = 0.0, 0.0
        for generator in range(self._num_generators):
            if record := read_status(self._store, "generate", generator):
                seconds = record.get("seconds", {})
                waited += record.get("starved_ms", 0) / 1000 + seconds.get("idle", 0.0)
                lived += sum(seconds.values())
        return waited, lived
