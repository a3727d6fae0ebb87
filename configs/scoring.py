"""What earns a reward."""

import re

from pydantic import field_validator

from configs.section import Count, Replicas, Section, Text


class ScoringConfig(Section):
    """What earns a reward."""

    reward: Text = "exact_match"
    """Name of the reward."""
    replicas: Replicas = 1
    """Scorer processes."""
    answer_pattern: str | None = None
    """Regular expression whose first group, in its last match, is the answer; null takes the stripped response."""
    threads: Count = 1
    """CPU threads of each scorer."""

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
