"""Which reward a config's name stands for. Nothing heavy is imported: a reward does that when it is loaded."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from configs.scoring import ScoringConfig
from millrace.errors import InputError
from millrace.rewards.base import Reward
from millrace.rewards.exact_match import ExactMatch
from millrace.rewards.function import PythonReward
from millrace.rewards.math import MathReward
from millrace.rewards.reasoning_gym import ReasoningGym
from millrace.rewards.reward_model import RewardModel
from millrace.rewards.verifiers import Verifiers
from millrace.rewards.weighted_sum import WeightedSum

_PARTS: Mapping[str, tuple[Callable[..., Reward], Sequence[str]]] = {
    ExactMatch.name: (ExactMatch, ["answer_pattern"]),
    MathReward.name: (MathReward, []),
    PythonReward.name: (PythonReward, ["function"]),
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
    parts = [_make_part("a name in scoring.weights", name, scoring, sources) for name in names]
    return WeightedSum(parts, scoring.weights)


def make_part(name: str, options: Mapping[str, Any]) -> Reward:
    """Make the reward `name` from `Reward.options` of an equal one, in another process."""
    reward = _PARTS[name][0](**options)
    reward.options = options
    return reward


def _make_part(key: str, name: str, scoring: ScoringConfig, sources: Sequence[str]) -> Reward:
    if name not in _PARTS:
        raise InputError(f'{key} is "{name}"; expected one of {", ".join(sorted([*_PARTS, WeightedSum.name]))}')
    known = {**scoring.model_dump(), "sources": list(sources)}
    return make_part(name, {option: known[option] for option in _PARTS[name][1]})
