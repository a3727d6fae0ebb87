"""The trainer's intake: which scored groups the next step trains, and what becomes of the others.

    loader ─► readable? policy still exists? within the bound? selected? ──no──► dropped, with its reason, counted
                  │ yes
                  └─► groups of the next step

Groups taken between two steps count only once the step is done.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, Protocol

import numpy as np

from configs.training import SelectionConfig
from millrace.rollouts.consumed import ConsumedWriter
from millrace.rollouts.ledger import Account
from millrace.rollouts.length_bias import LengthBias, Ratios
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.loader import RolloutLoader
from millrace.rollouts.masking import mask_too_old
from millrace.rollouts.overtaking import Overtaking
from millrace.rollouts.scored_group import LostPart, ScoredGroup
from millrace.rollouts.staleness import TOKENS_OF_STALENESS, is_too_old
from millrace.selection.spread import ZERO_ADVANTAGE, SpreadFilter
from millrace.selection.truncation import mask_truncated

_STALE_SECONDS = 60.0
"""Minimum time between two events about rollouts dropped as stale."""
Notification = Literal["staleness.bound-hit", "staleness.length-bias", "selection.starving"]


class Reporter(Protocol):
    """Who hears of what happens; a stage does."""

    def log(self, line: str) -> None:
        """A line for people."""

    def emit_event(self, kind: Notification, **payload: Any) -> None:
        """An event; `payload` is plain JSON."""


class Intake:
    """The intake of one trainer process. `account` counts what is dropped, `consumed` records it.

    `masks_too_old`: whether tokens beyond the bound carry no loss, instead of their whole group being dropped.
    """

    def __init__(
        self,
        reporter: Reporter,
        loader: RolloutLoader,
        lineage: Lineage,
        consumed: ConsumedWriter,
        account: Account,
        *,
        selection: SelectionConfig,
        masks_too_old: bool,
        groups_per_step: int,
        group_size: int,
        num_generators: int,
    ) -> None:
        self._reporter, self._loader, self._lineage = reporter, loader, lineage
        self._consumed, self._account = consumed, account
        self._selection, self._masks_too_old = selection, masks_too_old
        self._groups_per_step, self._group_size = groups_per_step, group_size
        self._length_bias = LengthBias()
        self._overtaking = Overtaking(num_generators)
        # Rollouts dropped as stale since the last event about them, and the time of that event.
        self._stale_rollouts, self._t_stale_event = 0, -math.inf
        self.spread = SpreadFilter(selection, groups_per_step)
        self.groups: list[ScoredGroup] = []
        """Of the next step, in the order in which they were taken."""
        self._overtaken: list[int] = []

    def collect(self, trainer_version: int, max_staleness: int) -> bool:
        """Takes scored groups for a step from `trainer_version`, under this bound. Returns whether there are enough.

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
            for reason, members in group.left_out.items():
                amount, reward_sum = group.amount(members), _reward_sum(group, members)
                self._account.drop(reason, amount, generator=group.generator, reward_sum=reward_sum)

    def in_order(self) -> list[ScoredGroup]:
        """The groups of the next step by number: arrival order varies from run to run, that in the batch must not."""
        return sorted(self.groups, key=lambda group: group.group_id)

    def end_step(self, trainer_version: int) -> tuple[Ratios, Mapping[str, float]]:
        """The groups were trained by a step from `trainer_version`: begins those of another.

        Returns the length bias, and the step's metrics.
        """
        by_staleness = tokens_by_staleness(self.groups, trainer_version)
        for group in self.in_order():
            self._length_bias.take(group, group.trained)
        ratios = self._length_bias.step()
        if self._length_bias.has_left(ratios):
            self._reporter.emit_event("staleness.length-bias", **asdict(ratios), sentence=ratios.sentence)
            self._reporter.log(ratios.sentence)
        overtaken = self._overtaken
        self.groups, self._overtaken = [], []
        return ratios, {
            **ratios.metrics(),
            **{f"{TOKENS_OF_STALENESS}{value}": count for value, count in by_staleness.items()},
            "zero_advantage_share": self.spread.step(),
            "overtaken_groups_max": max(overtaken),
            "overtaken_groups_mean": sum(overtaken) / len(overtaken),
        }

    def _keep_or_drop(self, group: ScoredGroup, version: int, max_staleness: int) -> None:
        if not self._lineage.holds(group.incarnation, group.part_max_policy_version):
            # Its generator makes it again under weights that exist, so it makes no room for another.
            self._drop(group, "rolled_back", version)
            return
        overtaken = self._overtaking.take(group.group_id)
        group = mask_truncated(group, self._selection)
        if self._masks_too_old:
            group = mask_too_old(group, version, max_staleness)
        stale = is_too_old(group.oldest_version, version, max_staleness)
        reason = "stale" if stale else group.drop_reason or self.spread.drop_reason(group)
        if reason is None:
            self.groups.append(group)
            self._overtaken.append(overtaken)
            return
        self._drop(group, reason, version)
        self._account.groups_dropped += 1
        if reason == "stale":
            self._publish_stale(len(group.rewards))
        elif reason == ZERO_ADVANTAGE and (sentence := self.spread.starving()) is not None:
            self._reporter.emit_event("selection.starving", zero_advantage_share=self.spread.share, sentence=sentence)
            self._reporter.log(sentence)

    def _set_aside(self, part: LostPart, version: int) -> None:
        """Drops the rollouts of a damaged part; the parts after it are not affected."""
        self._reporter.log(f"set aside {part.left.rollouts} rollouts: {part.reason}")
        exists = self._lineage.holds(part.record.incarnation, part.record.max_policy_version)
        self._drop(part, "corrupt" if exists else "rolled_back", version)
        if exists:
            num_groups = part.left.rollouts // self._group_size
            self._account.groups_dropped += num_groups

    def _drop(self, group: ScoredGroup | LostPart, reason: str, version: int) -> None:
        reward_sum = _reward_sum(group, group.verified) if isinstance(group, ScoredGroup) else 0.0
        self._consumed.drop(group, reason, version)
        if reason not in ("rolled_back", ZERO_ADVANTAGE):
            self._length_bias.take(group)
        self._account.drop(reason, group.amount(), generator=group.generator, reward_sum=reward_sum)

    def _publish_stale(self, rollouts: int) -> None:
        self._stale_rollouts += rollouts
        if time.monotonic() - self._t_stale_event >= _STALE_SECONDS:
            self._reporter.emit_event("staleness.bound-hit", rollouts_dropped=self._stale_rollouts)
            self._stale_rollouts, self._t_stale_event = 0, time.monotonic()


def tokens_by_staleness(groups: Sequence[ScoredGroup], trainer_version: int) -> dict[int, int]:
    """How many tokens with loss the trained members have, by how far `trainer_version` is ahead of each one's."""
    versions = [group.token_versions(i)[group.loss_mask[i] > 0] for group in groups for i in group.trained]
    values, counts = np.unique(trainer_version - np.concatenate(versions), return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _reward_sum(group: ScoredGroup, members: Sequence[int]) -> float:
    return float(sum(group.rewards[i] or 0.0 for i in members))
