"""What a train loop does against a collapse of training, as `training.on_collapse` says.

checkpoint ─► what the run's steps measured ─► watch ─► collapse ─► told ─► go_on: nothing more
                                                 ▲                       ├► stop: TrainingDiverged
step, with the learning rate that rollbacks left ┘                       └► roll_back: a decision, RolledBack
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from statistics import fmean
from typing import Any

from millrace.control.collapse import Collapse, CollapseWatch, LastGood
from millrace.control.rollback import roll_back
from millrace.errors import TrainingDiverged
from millrace.runs.decisions import Decisions, rate_factor
from millrace.runtime.stage import Stage
from millrace.training.batch import Sample
from millrace.training.checkpoints.saving import AsyncCheckpoints
from millrace.training.optimizer import planned_rate
from millrace.training.step_report import StepReport
from millrace.training.trainer import Trainer
from millrace.weights.base import Terms


class CollapseGuard:
    """Makes the steps of the trainer `incarnation`, and watches them. `terms` are those of a policy version.

    `state` is that of the checkpoint that the trainer starts from; those of earlier Millrace versions have none.
    """

    def __init__(
        self,
        stage: Stage,
        trainer: Trainer,
        decisions: Decisions,
        checkpoints: AsyncCheckpoints,
        *,
        incarnation: int,
        terms: Callable[[int], Terms],
        state: Mapping[str, Any] | None,
    ) -> None:
        self._stage, self._trainer = stage, trainer
        self._decisions, self._checkpoints = decisions, checkpoints
        self._incarnation = incarnation
        self._training = stage.config.training
        self._terms = terms
        self._rate_factor = rate_factor(decisions.all, incarnation)
        found: Mapping[str, Any] = state or {}
        if found.get("rewards_of") != self._rewards_of:
            # Without spread-less groups a step's mean reward is another one.
            found = {}
        self._watch = CollapseWatch(found.get("watch"))
        self._last_good = LastGood(found.get("last_good"))

    @property
    def _rewards_of(self) -> str:
        return "groups with spread" if self._training.selection.drop_zero_advantage else "all groups"

    def train(self, samples: Sequence[Sample]) -> StepReport:
        """One step of the trainer. Raises TrainingDiverged, or RolledBack for it if the run may go back."""
        rate = self._rate(self._trainer.policy_version + 1)
        try:
            return self._trainer.step(samples, self._rate_factor)
        except TrainingDiverged as error:
            if self._training.on_collapse == "roll_back":
                self.act(self._last_good.collapse(str(error), rate))
            raise

    def watch(self, report: StepReport, reward: float, lags: Sequence[int]) -> Collapse | None:
        """Takes the step that is done, with its mean reward and its groups' staleness."""
        version = self._trainer.policy_version
        rate = self._rate(version)
        sentence = self._watch.step(version, reward=reward, entropy=report.entropy, mismatch_kl=report.mismatch_kl)
        earned_by = version - 1 - ceil(fmean(lags))
        self._last_good.step(version, earned_by=earned_by, rate=rate, is_good=self._watch.is_good)
        return None if sentence is None else self._last_good.collapse(sentence, rate)

    def act(self, collapse: Collapse) -> None:
        """Reports it. Raises RolledBack or TrainingDiverged as `training.on_collapse` says."""
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
                self._checkpoints.finish()
                raise roll_back(
                    self._stage.store,
                    self._decisions,
                    collapse,
                    incarnation=self._incarnation,
                    terms=self._terms(self._trainer.policy_version),
                )

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        return {
            "rewards_of": self._rewards_of,
            "watch": self._watch.state(),
            "last_good": self._last_good.state(),
        }

    def _rate(self, version: int) -> float:
        """Learning rate of the step that makes `version`, without √ESS."""
        return planned_rate(self._training, version) * self._rate_factor
