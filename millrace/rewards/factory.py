"""Which reward a config's name stands for. Nothing heavy is imported: a reward does that when it is loaded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.errors import InputError
from millrace.rewards.base import Reward
from millrace.rewards.exact_match import ExactMatch
from millrace.rewards.math import MathReward
from millrace.rewards.python import PythonReward
from millrace.rewards.reasoning_gym import ReasoningGym
from millrace.rewards.reward_model import RewardModel
from millrace.rewards.verifiers import Verifiers
from millrace.rewards.weighted_sum import WeightedSum


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardOptions:
    """What configs say about rewards; each takes what it knows of it."""

    answer_pattern: str | None = None
    """Of `exact_match` and `reasoning_gym`."""
    function: str | None = None
    """Of `python`."""
    model: str | None = None
    """Of `reward_model`."""
    device: str = "cpu"
    """Of `reward_model`."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of `weighted_sum`, whose parts take the other options."""
    sources: Sequence[str] = ()
    """Of `reasoning_gym` and `verifiers`: `Prompt.source` of the prompts to come."""


def make_reward(name: str, **options: Any) -> Reward:
    """Make the reward that configs call `name`; `options` are those of `RewardOptions`, and those it lacks ignored.

    Raises InputError for a name or an option value that can't be used, TypeError for an option that no reward has.
    """
    return _make("scoring.reward", name, RewardOptions(**options))


def _make(key: str, name: str, options: RewardOptions) -> Reward:
    if name not in _MAKERS:
        raise InputError(f'{key} is "{name}"; expected one of {", ".join(sorted(_MAKERS))}')
    return _MAKERS[name](options)


def _weighted_sum(options: RewardOptions) -> Reward:
    if WeightedSum.name in options.weights:
        raise InputError(f"scoring.weights has {WeightedSum.name}; expected the rewards that it adds")
    parts = [_make("a name in scoring.weights", name, options) for name in sorted(options.weights)]
    return WeightedSum(parts, options.weights)


_MAKERS: Mapping[str, Callable[[RewardOptions], Reward]] = {
    ExactMatch.name: lambda options: ExactMatch(answer_pattern=options.answer_pattern),
    MathReward.name: lambda options: MathReward(),
    PythonReward.name: lambda options: PythonReward(function=options.function),
    ReasoningGym.name: lambda options: ReasoningGym(answer_pattern=options.answer_pattern, sources=options.sources),
    RewardModel.name: lambda options: RewardModel(model=options.model, device=options.device),
    Verifiers.name: lambda options: Verifiers(sources=options.sources),
    WeightedSum.name: _weighted_sum,
}
