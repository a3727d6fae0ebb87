"""Makes the reward that a config names, or the sum of several. Nothing heavy is imported before `load`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from configs.task import ScoringConfig
from millrace.errors import InputError
from millrace.rewards.base import Reward, Score, failed
from millrace.rewards.exact_match import ExactMatch
from millrace.rewards.function import PythonReward
from millrace.rewards.math import MathReward
from millrace.rewards.packages import ReasoningGym, Verifiers
from millrace.rewards.reward_model import RewardModel
from millrace.rewards.services.judge import Judge
from millrace.rewards.services.remote import HttpReward
from millrace.types import Prompt


class WeightedSum(Reward):
    """The sum of the parts' rewards times their weights.

    Components: the reward of each part under the part's name, and its own components under `<part>/<component>`. If a
    part has no reward, neither has the sum: its status is `error`, or `timeout` if parts only timed out.
    """

    name = "weighted_sum"

    def __init__(self, parts: Sequence[Reward], weights: Mapping[str, float]) -> None:
        """`weights`: by the name of each part, no unit."""
        self.parts = tuple(parts)
        self._weights = dict(weights)

    def combine_versions(self, versions: Mapping[str, str]) -> str:
        """Make the sum's version from the parts' versions by name."""
        return " + ".join(f"{self._weights[part.name]:g}*{part.name}({versions[part.name]})" for part in self.parts)

    def combine(self, scores: Mapping[str, Score]) -> Score:
        """Make the sum's score from the parts' scores by name."""
        failures = {name: score for name, score in scores.items() if score.status != "ok"}
        if failures:
            reason = "; ".join(f"{name}: {score.error}" for name, score in failures.items())
            return failed(reason, "error" if any(score.status == "error" for score in failures.values()) else "timeout")
        rewards = {name: score.reward for name, score in scores.items() if score.reward is not None}
        details = {
            f"{name}/{component}": value
            for name, score in scores.items()
            for component, value in score.components.items()
            if component != name
        }
        total = sum(self._weights[name] * reward for name, reward in rewards.items())
        try:
            return Score(reward=total, components={**rewards, **details})
        except ValueError as error:
            return failed(f"the sum: {error}")

    def score(self, prompt: Prompt, response: str) -> Score:
        """Score with all parts in this process. A `Scorer` runs isolated parts in its pool instead."""
        return self.combine({part.name: part.score_batch([(prompt, response)])[0] for part in self.parts})


_PARTS: Mapping[str, tuple[Callable[..., Reward], Sequence[str]]] = {
    ExactMatch.name: (ExactMatch, ["answer_pattern"]),
    HttpReward.name: (HttpReward, ["endpoint", "timeout_seconds"]),
    Judge.name: (Judge, ["endpoint", "judge", "model", "device", "timeout_seconds"]),
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
    is_sum = scoring.reward == WeightedSum.name
    key, names = ("scoring.weights", sorted(scoring.weights)) if is_sum else ("scoring.reward", [scoring.reward])
    if not names:
        raise InputError("empty", key=key, expected="a weight for each reward to add")
    available = {**scoring.model_dump(), "sources": list(sources)}
    parts = []
    for name in names:
        if ":" in name:
            parts.append(make_part(name, {"key": key}))
        elif name in _PARTS:
            parts.append(make_part(name, {option: available[option] for option in _PARTS[name][1]}))
        else:
            choices = sorted(_PARTS if is_sum else [*_PARTS, WeightedSum.name])
            expected = f"one of {', '.join(choices)}, or package.module:function"
            raise InputError(f'"{name}"', key=key, expected=expected)
    return WeightedSum(parts, scoring.weights) if is_sum else parts[0]


def make_part(name: str, options: Mapping[str, Any]) -> Reward:
    """Make the reward `name` from `Reward.options` of an equal one, in another process."""
    reward = PythonReward(name, **options) if ":" in name else _PARTS[name][0](**options)
    reward.options = options
    return reward
