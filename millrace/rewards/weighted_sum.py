"""Several rewards as one: each scored separately, then added with its weight."""

from collections.abc import Mapping, Sequence

from millrace.errors import InputError
from millrace.rewards.base import Reward, Score, checked_reward, failed
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
        scores = {part.name: part.score_batch([(prompt, response)])[0] for part in self.parts}
        return self.combine(scores)
