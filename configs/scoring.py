"""What earns a reward."""

import re
from typing import Literal

from pydantic import Field, field_validator

from configs.section import Count, Positive, Replicas, Section, Text


class ScoringConfig(Section):
    """What earns a reward."""

    reward: Text = "exact_match"
    """Name of the reward: `exact_match`, `math`, `python`, `reasoning_gym`, `reward_model`, `verifiers` or
    `weighted_sum`."""
    replicas: Replicas = 1
    """Scorer processes."""
    answer_pattern: str | None = None
    """Regular expression whose first group, in its last match, is the answer; null takes the stripped response."""
    function: Text | None = None
    """`package.module:function` of the reward `python`, called with prompt, response, answer and a dict of the rest."""
    model: Text | None = None
    """Folder of the reward `reward_model`: a Hugging Face sequence-classification model with one label."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What `reward_model` runs on."""
    weights: dict[str, float] = Field(default_factory=dict)
    """What `weighted_sum` adds: the weight of each reward by its name, no unit."""
    threads: Count = 1
    """CPU threads of each scorer."""
    workers: Count = 1
    """Responses that each scorer judges at once, each in a process that can be killed."""
    timeout_seconds: Positive = 10.0
    """The most that judging a response may take there, by the clock; then it has the status `timeout` and no reward."""
    memory_mb: Count = 1024
    """The most memory that judging may take there, beyond what loading the reward took, MiB."""

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
