"""Limits of one attempt, and of the silence of a stage."""

from configs.section import Count, Positive, Section


class BudgetConfig(Section):
    """Limits of one attempt, such as one night of a campaign. The next attempt continues the run."""

    duration_minutes: Positive | None = None
    """After this time the stages drain and the last checkpoint is evaluated, minutes; null: no limit."""
    max_steps: Count | None = None
    """Maximum optimizer steps of one attempt; null: only `training.max_steps` applies."""


class SupervisionConfig(Section):
    """When a stage counts as hung, so that it is named in the log, killed and restarted; and how long it may drain."""

    hang_seconds: Positive = 120.0
    """Maximum time without progress, seconds. A layer of a pass counts as progress, and so does a sampled token; an
    upload of a file does not."""
    start_seconds: Positive = 600.0
    """The same limit while a stage starts and loads its model, seconds."""
    drain_seconds: Positive = 600.0
    """Maximum time for a stage that is asked to stop to finish its optimizer step, batch or checkpoint, seconds. Then
    it is killed, and what it had not committed is lost."""
