"""A scorer of a run with one source, and what it scores."""

from collections.abc import Sequence

from configs.stored import DEFAULT_SOURCE
from millrace.rewards.base import Reward, Score
from millrace.rewards.isolation.sandbox import Limits
from millrace.rewards.scorer import Scorer
from millrace.types import Prompt


def scorer_of(reward: Reward, limits: Limits | None = None) -> Scorer:
    return Scorer({DEFAULT_SOURCE: reward}, {DEFAULT_SOURCE: limits or Limits()})


def score_pairs(scorer: Scorer, pairs: Sequence[tuple[Prompt, str]]) -> list[Score]:
    """Scores responses to prompts, in order."""
    return scorer.score_many([(DEFAULT_SOURCE, prompt, response) for prompt, response in pairs])
