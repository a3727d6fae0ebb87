"""Collects the scored groups that the next step trains; drops and counts the others.

    loader ─► readable? policy still exists? a token within the bound? selected? ─no─► dropped, counted
                  │ yes
                  └─► groups of the next step

Groups of a step are recorded once the step is done. What happens to a group beyond the bound is decided by
`staleness.too_old`:

    keep   it is trained whole: the bound limits admission only (default)
    mask   its old tokens get no loss; it is dropped as `stale` only if no trainable token remains
    drop   it is dropped as `stale`
    wait   the trainer delays a step that would leave groups too old; one that is too old all the same is dropped
"""

import math
import time
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from millrace.rollouts.consumed import ConsumedWriter
from millrace.rollouts.ledger import Account
from millrace.rollouts.length_bias import LengthBias, Ratios
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.loader import RolloutLoader
from millrace.rollouts.masking import mask_too_old, mask_truncated
from millrace.rollouts.scored_group import LostPart, ScoredGroup
from millrace.rollouts.shaping import ZERO_ADVANTAGE, SpreadFilter
from millrace.rollouts.staleness import TOKENS_OF_STALENESS, is_too_old, step_leaves_too_old
from millrace.runtime.stage import Stage
from millrace.stages.train.train_state import mixed_sources
from storage.progress import read_status

_STALE_SECONDS = 60.0
"""Minimum time between two events about rollouts dropped as stale."""
_LATEST_GROUPS = 4096
"""Number of groups to remember per generator, for counting how many of them overtook a straggler."""


class BatchCollector:
    """Collects the groups of each step of one trainer process. `account` counts the drops, `consumed` records them."""

    def __init__(
        self,
        stage: Stage,
        loader: RolloutLoader,
        lineage: Lineage,
        consumed: ConsumedWriter,
        account: Account,
    ) -> None:
        self._stage, self._loader, self._lineage = stage, loader, lineage
        self._consumed, self._account = consumed, account
        training = stage.config.training
        self._selection, self._groups_per_step = training.selection, training.groups_per_step
        self._length_bias = LengthBias()
        # By source, in a run with several; and the groups of each that were dropped since the last step.
        self._bias_of_source = {source: LengthBias() for source in mixed_sources(stage.config)}
        self._dropped_of_source = Counter[str]()
        # The latest groups taken from each generator, ascending, and how many overtook each group of the next step.
        self._latest = defaultdict[int, list[int]](list)
        self._overtaken: list[int] = []
        # Rollouts dropped as stale since the last event about them, and the time of that event.
        self._stale_rollouts, self._t_stale_event = 0, -math.inf
        self.spread = SpreadFilter(training.selection, training.groups_per_step)
        self.groups: list[ScoredGroup] = []
        """Groups of the next step, in the order in which they were taken."""

    def collect(self, trainer_version: int, max_staleness: int) -> bool:
        """Collects groups for a step from `trainer_version`, under this bound. Returns whether they are enough.

        Raises as `RolloutLoader.take`.
        """
        while len(self.groups) < self._groups_per_step:
            group = self._loader.take()
            if group is None:
                return False
            if isinstance(group, LostPart):
                self._set_aside(group, trainer_version)
            else:
                self._keep_or_drop(group, trainer_version, max_staleness)
        return True

    def account_for(self, lags: Sequence[int]) -> None:
        """Counts the groups as trained; `lags` has the staleness of each, in order of group numbers."""
        for group, lag in zip(self.in_order(), lags, strict=True):
            self._account.train(
                group.amount(group.trained),
                generator=group.generator,
                staleness=lag,
                reward_sum=_reward_sum(group, group.trained),
                masked=group.masked_amount(),
            )
            for i in range(len(group.rewards)):
                if (reason := group.drop_reason_of(i)) is not None:
                    amount, reward_sum = group.amount([i]), _reward_sum(group, [i])
                    self._account.drop(reason, amount, generator=group.generator, reward_sum=reward_sum)

    def in_order(self) -> list[ScoredGroup]:
        """The groups of the next step by number: their order in the batch must not depend on their arrival."""
        return sorted(self.groups, key=lambda group: group.group_id)

    def end_step(self, trainer_version: int) -> tuple[Ratios, Mapping[str, float]]:
        """Ends the step from `trainer_version` that trained the groups. Returns its length bias and its metrics."""
        trained = [(group, i) for group in self.groups for i in group.trained]
        is_trained_N = np.concatenate([group.loss_mask[i] for group, i in trained]) > 0
        versions_N = np.concatenate([group.token_versions(i) for group, i in trained])
        lags, counts = np.unique(trainer_version - versions_N[is_trained_N], return_counts=True)
        for group in self.in_order():
            self._count_length(group, group.trained)
        ratios = self._length_bias.step()
        if self._length_bias.has_left(ratios):
            self._stage.emit_event("staleness.length-bias", **asdict(ratios), sentence=ratios.sentence)
            self._stage.log(ratios.sentence)
        overtaken = self._overtaken
        self.groups, self._overtaken = [], []
        return ratios, {
            **ratios.metrics(),
            **{f"{TOKENS_OF_STALENESS}{lag}": int(count) for lag, count in zip(lags, counts, strict=True)},
            **self.spread.step(self._bias_of_source),
            **self._metrics_of_sources(),
            "overtaken_groups_max": max(overtaken),
            "overtaken_groups_mean": sum(overtaken) / len(overtaken),
        }

    def _metrics_of_sources(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for source, bias in self._bias_of_source.items():
            of_source = {"groups_dropped": self._dropped_of_source[source], **bias.step().metrics()}
            metrics |= {f"{name}/{source}": value for name, value in of_source.items() if not math.isnan(value)}
        self._dropped_of_source.clear()
        return metrics

    def _count_length(self, group: ScoredGroup | LostPart, trained: Sequence[int] = ()) -> None:
        self._length_bias.take(group, trained)
        if isinstance(group, ScoredGroup) and group.source in self._bias_of_source:
            self._bias_of_source[group.source].take(group, trained)

    def _count_overtaking(self, group: ScoredGroup) -> int:
        """How many later groups of its generator were taken before `group`, of the latest `_LATEST_GROUPS`."""
        latest = self._latest[group.generator]
        place = bisect(latest, group.group_id)
        latest.insert(place, group.group_id)
        num_later = len(latest) - 1 - place
        del latest[:-_LATEST_GROUPS]
        return num_later

    def _keep_or_drop(self, group: ScoredGroup, version: int, max_staleness: int) -> None:
        if not self._lineage.holds(group.incarnation, group.part_max_policy_version):
            # Its generator will generate it again, so this drop must not raise the admission limit (`groups_dropped`).
            self._drop(group, "rolled_back", version)
            return
        overtaken = self._count_overtaking(group)
        group = mask_truncated(group, self._selection)
        too_old = self._stage.config.staleness.too_old
        if too_old == "mask":
            group = mask_too_old(group, version, max_staleness)
        stale = too_old != "keep" and is_too_old(group.oldest_version, version, max_staleness)
        reason = "stale" if stale else group.drop_reason or self.spread.drop_reason(group)
        if reason is None:
            self.groups.append(group)
            self._overtaken.append(overtaken)
            return
        self._drop(group, reason, version)
        self._account.groups_dropped += 1
        self._dropped_of_source[group.source] += 1
        if reason == "stale":
            self._stale_rollouts += len(group.rewards)
            if time.monotonic() - self._t_stale_event >= _STALE_SECONDS:
                self._stage.emit_event("staleness.bound-hit", rollouts_dropped=self._stale_rollouts)
                self._stale_rollouts, self._t_stale_event = 0, time.monotonic()
        elif reason == ZERO_ADVANTAGE and (sentence := self.spread.starving()) is not None:
            self._stage.emit_event("selection.starving", zero_advantage_share=self.spread.share, sentence=sentence)
            self._stage.log(sentence)

    def _set_aside(self, part: LostPart, version: int) -> None:
        self._stage.log(f"set aside {part.left.rollouts} rollouts: {part.reason}")
        exists = self._lineage.holds(part.record.incarnation, part.record.max_policy_version)
        self._drop(part, "corrupt" if exists else "rolled_back", version)
        if exists:
            self._account.groups_dropped += part.num_groups

    def _drop(self, group: ScoredGroup | LostPart, reason: str, version: int) -> None:
        reward_sum = _reward_sum(group, group.verified) if isinstance(group, ScoredGroup) else 0.0
        self._consumed.drop(group, reason, version)
        if reason not in ("rolled_back", ZERO_ADVANTAGE):
            self._count_length(group)
        self._account.drop(reason, group.amount(), generator=group.generator, reward_sum=reward_sum)


def stragglers_are_in(stage: Stage, loader: RolloutLoader, trainer_version: int, max_staleness: int) -> bool:
    """Returns True if a step from `trainer_version` makes no in-flight or unscored group too old for the next step.

    trainer at t, about to make t + 1; bound η       a group admitted under version v is trained at t + 1 or later,
                                                     so it would be too old if t + 1 − v > η
    in flight    status records of the generators ─┐
    unscored     commit records ahead of the scores ┴─► the oldest v ─► wait?

    Admission allows at most a step's worth of such groups, so all of them fit into the next step. A group can still
    become too old, and is dropped, if younger groups overtook it in earlier steps or a status record was late. A
    generator that has been silent for `supervision.hang_seconds` counts as idle, so that a generator that never returns
    can't block the trainer. Raises as `RolloutLoader.take`.
    """
    # Generators first: a group that is no longer in flight has been committed.
    records = [read_status(stage.store, "generate", g) for g in range(stage.config.generation.replicas)]
    versions: list[int | None] = [
        record.get("oldest_version_in_flight")
        for record in records
        if time.time() - record.get("t", 0.0) <= stage.config.supervision.hang_seconds
    ]
    versions.append(loader.oldest_unscored())
    return not any(
        version is not None and step_leaves_too_old(version, trainer_version, max_staleness) for version in versions
    )


def _reward_sum(group: ScoredGroup, members: Sequence[int]) -> float:
    return float(sum(group.rewards[i] or 0.0 for i in members))
