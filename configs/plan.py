"""What `millrace plan` is asked, and what it predicted of a run."""

from typing import Annotated, Literal

from pydantic import Field

from configs.section import Count, NonNegative, Parameters, Positive, Section, Text


class PlanConfig(Parameters):
    """What `millrace plan` predicted of a run with this config. `millrace status` compares it with what was measured;
    nothing else depends on it."""

    step_seconds: Positive | None = None
    """Seconds per optimizer step; null: not predicted."""
    tokens_per_second: Positive | None = None
    """Response tokens trained per second; null: not predicted."""
    staleness_mean: NonNegative | None = None
    """Mean staleness of the trajectories trained, policy versions; null: not predicted."""
    dropped_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Fraction of the trajectories that the trainer takes and drops; null: not predicted."""


class GivenLengthsConfig(Section):
    """Log-normal lengths of responses, and one length of all prompts."""

    mean: Positive
    """Mean length of a response before it is cut off at `generation.max_new_tokens`, tokens."""
    sigma: NonNegative
    """Standard deviation of the logarithm of a response's length, no unit; 0: all are alike, 1: a long tail."""
    prompt: Count
    """Length of a prompt, tokens."""


class PlanRequest(Section):
    """One plan."""

    hardware: Text | None = None
    """Kind of GPU, such as h100; null: the machine of `sources`."""
    gpus: Count | None = None
    """Number of GPUs that trainer and generators divide; null: those of the config, which is then not changed but by
    `what_if`."""
    model: Text | None = None
    """Folder of a model, or a known name such as llama-8b; null: the config's model."""
    sources: list[Text] = Field(default_factory=list)
    """Folders or URLs of stored runs of one machine and model, from which durations and lengths are fitted."""
    cores: Positive | None = None
    """CPU cores that all stages of `sources` shared; null: those of this host if they trained on the CPU, else none."""
    what_if: list[Text] = Field(default_factory=list)
    """Compare the config with this change of it, each `section.key=value`, in place of a search."""
    goal: Literal["fastest", "cheapest"] = "fastest"
    """`fastest`: most tokens trained per second; `cheapest`: fewest GPU-hours per token trained."""
    batches: list[Count] = Field(default_factory=list)
    """Values of `training.groups_per_step` to try besides the config's."""
    price: Positive | None = None
    """Dollars per GPU and hour; null: nothing is said about dollars."""
    steps: Count | None = None
    """Optimizer steps to simulate of what is shown, after a warm-up; null: at most 100, fewer if batches are large."""
    lengths: GivenLengthsConfig | None = None
    """Lengths of prompts and responses; null: those of `sources`, or a guess from `generation.max_new_tokens`."""
