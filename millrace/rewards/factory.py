"""Which reward a config's name stands for, and the sum of several. Nothing heavy is imported before `load`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from configs.scoring import ScoringConfig
from millrace.errors import InputError
from millrace.rewards.base import Reward, Score, checked_reward, failed
from millrace.rewards.exact_match import ExactMatch
from millrace.rewards.function import PythonReward
from millrace.rewards.math import MathReward
from millrace.rewards.reasoning_gym import ReasoningGym
from millrace.rewards.reward_model import RewardModel
from millrace.rewards.verifiers import Verifiers
from millrace.types import Prompt


class WeightedSum(Reward):
    """The sum of the parts' rewards times their weights.

    Components: the reward of each part under the part's name, and its own components under `<part>/<component>`. If a
    part has no reward, neither has the sum: its status is `error`, or `timeout` if parts only timed out.
    """

    name = "weighted_sum"

    def __init__(self, parts: Sequence[Reward], weights: Mapping[str, float]) -> None:
        """`weights`: by the name of each part, no unit. Raises InputError if there is no part."""
        if not parts:
            raise InputError("scoring.weights is empty; expected a weight for each reward to add")
        self.parts = tuple(parts)
        self._weights = dict(weights)

    def versioned(self, versions: Mapping[str, str]) -> str:
        """The sum's version, from the parts' versions by name."""
        return " + ".join(f"{self._weights[part.name]:g}*{part.name}({versions[part.name]})" for part in self.parts)

    def combine(self, scores: Mapping[str, Score]) -> Score:
        """The sum's score, from the parts' scores by name."""
        bad = {name: score for name, score in scores.items() if score.reward is None}
        if bad:
            reason = "; ".join(f"{name}: {score.error}" for name, score in bad.items())
            return failed(reason, "error" if any(score.status == "error" for score in bad.values()) else "timeout")
        rewards = {name: score.reward for name, score in scores.items() if score.reward is not None}
        components = {
            f"{name}/{component}": value
            for name, score in scores.items()
            for component, value in score.components.items()
            if component != name
        }
        total = sum(self._weights[name] * reward for name, reward in rewards.items())
        try:
            checked_reward("the sum", total)
        except ValueError as error:
            return failed(str(error))
        return Score(reward=total, components={**rewards, **components})

    def score(self, prompt: Prompt, response: str) -> Score:
        """Score with all parts in this process. A `Scorer` runs isolated parts in its pool instead."""
        return self.combine({part.name: part.score_batch([(prompt, response)])[0] for part in self.parts})


_PARTS: Mapping[str, tuple[Callable[..., Reward], Sequence[str]]] = {
    ExactMatch.name: (ExactMatch, ["answer_pattern"]),
    MathReward.name: (MathReward, []),
    ReasoningGym.name: (ReasoningGym, ["answer_pattern", "sources"]),
    RewardModel.name: (RewardModel, ["model", "device"]),
    Verifiers.name: (Verifiers, ["sources"]),
}
"""Every reward but the sum of others, with its options: keys of the config's section, and `sources`."""


def make_reward(scoring: ScoringConfig, sources: Sequence[str] = ()) -> Reward:
    """Make the reward that `scoring.reward` names. `sources` are those of the prompts to come (`Prompt.source`).

    Raises InputError for a name or an option that can't be used.
    """
    if scoring.reward != WeightedSum.name:
        return _make_part("scoring.reward", scoring.reward, scoring, sources)
    if WeightedSum.name in scoring.weights:
        raise InputError(f"scoring.weights has {WeightedSum.name}; expected the rewards that it adds")
    names = sorted(scoring.weights)
    parts = [_make_part("scoring.weights", name, scoring, sources) for name in names]
    return WeightedSum(parts, scoring.weights)


def make_part(name: str, options: Mapping[str, Any]) -> Reward:
    """Make the reward `name` from `Reward.options` of an equal one, in another process."""
    reward = PythonReward(name, **options) if ":" in name else _PARTS[name][0](**options)
    reward.options = options
    return reward


def _make_part(key: str, name: str, scoring: ScoringConfig, sources: Sequence[str]) -> Reward:
    if ":" in name:
        return make_part(name, {"key": key})
    if name not in _PARTS:
        names = ", ".join(sorted([*_PARTS, WeightedSum.name]))
        raise InputError(name, key=key, expected=f"one of {names}, or package.module:function")
    known = {**scoring.model_dump(), "sources": list(sources)}
    return make_part(name, {option: known[option] for option in _PARTS[name][1]})
