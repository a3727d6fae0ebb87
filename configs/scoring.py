"""How responses are rewarded."""

import re
from typing import Literal

from pydantic import Field, field_validator

from configs.section import Count, Positive, Replicas, Section, Text


class RewardConfig(Section):
    """How responses are rewarded; a source may have its own."""

    reward: Text = "exact_match"
    """Reward: `exact_match`, `math`, `reasoning_gym`, `reward_model`, `verifiers` or `weighted_sum`; or your own, as
    `package.module:function`, called with prompt, response, answer and a dict of other fields."""
    answer_pattern: str | None = None
    """Regular expression: the first group of its last match is the answer; null: all that follows `</think>` is."""
    model: Text | None = None
    """For the reward `reward_model`: folder of a Hugging Face sequence-classification model with one label, or its
    ORG/NAME on a hub."""
    weights: dict[str, float] = Field(default_factory=dict)
    """For the reward `weighted_sum`: weights by reward name, no unit."""
    timeout_seconds: Positive = 10.0
    """Maximum wall time to score a response, seconds; after that its status is `timeout` and it has no reward."""
    memory_mb: Count = 1024
    """Maximum memory of a process that scores a response, beyond what loading the reward takes, MiB."""

    @property
    def uses_reward_model(self) -> bool:
        """Whether `reward_model` is the reward, or a part of it."""
        return "reward_model" in (self.reward, *self.weights)

    @field_validator("answer_pattern")
    @classmethod
    def _has_a_group(cls, pattern: str | None) -> str | None:
        if pattern is None:
            return None
        try:
            num_groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"a regular expression, but this one does not compile ({error})") from error
        if num_groups == 0:
            raise ValueError("a regular expression with a group (...) around the answer")
        return pattern


class ScoringConfig(RewardConfig):
    """How responses are rewarded."""

    replicas: Replicas = 1
    """Number of scorer processes."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of `reward_model`."""
    threads: Count = 1
    """CPU threads per scorer."""
    workers: Count = 1
    """Responses that a scorer scores in parallel, each in a process that can be killed."""
