"""What one optimizer step comes to in numbers: the same of a live campaign and of a replay."""

from collections.abc import Sequence

from millrace.scored import ScoredGroup
from millrace.step_report import StepReport


def step_measures(report: StepReport, groups: Sequence[ScoredGroup], lags: Sequence[int]) -> dict[str, float]:
    """By metric name; `lags` are the groups' staleness, policy versions. Rewards are of the verified members."""
    rewards = [reward for group in groups for reward in group.rewards if reward is not None]
    lengths = [len(tokens) for group in groups for tokens in group.response_tokens]
    return {
        "reward_mean": sum(rewards) / len(rewards),
        "staleness_mean": sum(lags) / len(lags),
        "staleness_max": max(lags),
        "response_length_mean_tokens": sum(lengths) / len(lengths),
        **report.measured(),
    }
