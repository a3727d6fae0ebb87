"""The config of a stored attempt, parsed. Apart from `record`, which the dashboard reads without `configs`."""

from configs.schema import RunConfig
from millrace.runs.record import Attempt


def attempt_config(attempt: Attempt) -> RunConfig:
    """The config that the attempt was started with."""
    return RunConfig.model_validate(attempt.config)
