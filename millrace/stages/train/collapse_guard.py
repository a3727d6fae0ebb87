"""Detects a collapse of training, and reacts as configured by `training.on_collapse`.

checkpoint ─► measures of earlier steps ──────► watch ─► collapse ─► reported ─► go_on: continue
                                                 ▲                           ├► stop: TrainingDiverged
step, with the learning rate after rollbacks ────┘                           └► roll_back: a decision, RolledBack
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from statistics import fmean
from typing import Any

from configs.stored import DEFAULT_SOURCE
from millrace.control.collapse import Collapse, CollapseWatch
from millrace.control.rollback import roll_back
from millrace.errors import TrainingDiverged
from millrace.rollouts.scored_group import ScoredGroup
from millrace.runs.decisions import rate_factor
from millrace.stages.train.train_state import TrainState
from millrace.training.batch import Sample
from millrace.training.optimizer import planned_rate
from millrace.training.step_report import StepReport


class CollapseGuard:
    """Makes the steps of the trainer, and watches their measures.

    `bound_of` returns the staleness bound of a policy version. `stored`: what `state` returned for the checkpoint that
    the trainer starts from; None without one. A step with non-finite values ends training even if `on_collapse` is
    `go_on`.
    """

    def __init__(self, state: TrainState, bound_of: Callable[[int], int], stored: Mapping[str, Any] | None) -> None:
        self._run, self._stage, self._trainer = state, state.stage, state.trainer
        self._training = state.stage.config.training
        self._bound_of = bound_of
        self._rate_factor = rate_factor(state.decisions.all, state.incarnation)
        self._weights = {name: source.weight for name, source in state.stage.config.sources.items()}
        if stored is None or stored["rewards_of"] != self._rewards_of:
            # Means over groups with spread don't compare with means over all groups, nor those of other sources.
            stored = {}
        self._watch = CollapseWatch(**stored.get("watch", {}))
        self.rewards: dict[str, float] = dict(stored.get("rewards", {}))
        """Mean reward of each source in the last step that had it."""
        self._ongoing: str | None = None
        """Sentence of a collapse that is not over; the status record has it."""

    @property
    def _rewards_of(self) -> str:
        chosen = "groups with spread" if self._training.selection.drop_zero_advantage else "all groups"
        return f"{chosen} of {self._weights or DEFAULT_SOURCE}"

    def train(self, samples: Sequence[Sample]) -> StepReport:
        """Makes one step. Raises TrainingDiverged, or RolledBack in its place if `on_collapse` is `roll_back`."""
        rate = self._rate(self._trainer.policy_version + 1)
        try:
            return self._trainer.step(samples, self._rate_factor)
        except TrainingDiverged as error:
            if self._training.on_collapse == "roll_back":
                self.act(self._watch.collapse(str(error), rate))
            raise

    def watch(self, report: StepReport, groups: Sequence[ScoredGroup], lags: Sequence[int]) -> Collapse | None:
        """Records the last step, with its groups and their staleness. Returns the collapse, if any.

        Its reward is the mean over the sources by their first weights, so that a change of the mixture does not look
        like a collapse.
        """
        # Demonstrations say nothing about the policy.
        groups = [group for group in groups if not group.is_demonstration]
        if not groups:
            return None
        for source in {group.source for group in groups}:
            of_source = (group.rewards for group in groups if group.source == source)
            rewards = [reward for of_group in of_source for reward in of_group if reward is not None]
            self.rewards[source] = sum(rewards) / len(rewards)
        version = self._trainer.policy_version
        rate = self._rate(version)
        sentence = self._watch.step(
            version,
            reward=fmean(self.rewards.values(), [self._weights.get(source, 1.0) for source in self.rewards]),
            entropy=report.entropy,
            mismatch_kl=report.mismatch_kl,
            earned_by=version - 1 - ceil(fmean(lags)),
            rate=rate,
        )
        self._ongoing = sentence or (self._ongoing if self._watch.is_collapsed else None)
        self._stage.update_status(collapse=self._ongoing)
        return None if sentence is None else self._watch.collapse(sentence, rate)

    def act(self, collapse: Collapse) -> None:
        """Reports a collapse. With `on_collapse: stop` raises TrainingDiverged, with `roll_back` RolledBack."""
        self._stage.emit_event("training.collapsed", sentence=collapse.sentence, good_version=collapse.good_version)
        self._stage.log(f"training collapsed: {collapse.sentence}")
        match self._training.on_collapse:
            case "stop":
                raise TrainingDiverged(
                    f"training collapsed, and training.on_collapse is stop: {collapse.sentence}; the last good "
                    f"version was {collapse.good_version}"
                )
            case "roll_back":
                # Checkpoints in progress are finished first: the decision names them all.
                self._run.checkpoints.finish()
                raise roll_back(
                    self._stage.store,
                    self._run.decisions,
                    collapse,
                    incarnation=self._run.incarnation,
                    max_staleness=self._bound_of(self._trainer.policy_version),
                )

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        return {"rewards_of": self._rewards_of, "rewards": self.rewards, "watch": self._watch.state()}

    def _rate(self, version: int) -> float:
        """Learning rate of the step that makes `version`, without √ESS."""
        return planned_rate(self._training, version) * self._rate_factor
