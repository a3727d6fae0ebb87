"""Requests to `millrace replay` and `millrace plan`."""

from typing import Annotated, Literal

from pydantic import Field

from configs.section import Count, NonNegative, Positive, Section, Text

Version = Annotated[int, Field(ge=0)]
GroupOrder = Literal["stored", "shuffled"]


class Selection(Section):
    """Which groups of a stored run a replay uses."""

    from_step: Version | None = None
    """First optimizer step, named by the policy version that it made; null: the first stored. `verify` starts from the
    checkpoint of that version; `train` and `compare` leave out the batches before it."""
    to_step: Version | None = None
    """Last optimizer step, included; null: the last stored."""
    where: Text | None = None
    """SQL condition on the stored groups, such as `reward_mean > 0 and generator = 1`; docs/replay.md lists the
    columns."""
    max_staleness: Version | None = None
    """Leave out groups that were staler than this when they were trained, policy versions."""
    dropped: bool = False
    """`train`: also use groups that were dropped as stale, zero_advantage or truncated, but never those that could not
    be read or scored."""


class ReplayRequest(Selection):
    """One replay; the stored runs are never changed. Kept as `replay.json` in the replay's own run."""

    sources: Annotated[list[Text], Field(min_length=1)]
    """Folders or URLs of stored runs, each root/run id; `train` accepts more than one."""
    job: Literal["verify", "train", "compare"] | None = None
    """`verify`: train the original batches again and compare; `train`: train anew; `compare`: several losses on the
    same batches, without training; null: only score anew."""
    rescore: Text | None = None
    """Name of a reward to score the stored trajectories with; a `train` after it uses these scores."""
    run_id: Text
    """The replay's own folder under `root`."""
    root: Text = "runs"
    """Folder or URL under which the replay's run is written."""
    settings: list[str] = Field(default_factory=list)
    """Keys of the first source's config to change, each `section.key=value`, such as `training.learning_rate=1e-4`."""
    order: GroupOrder = "stored"
    """`train`: keep the stored order of the groups, one source after the other, or shuffle all of them by `seed`."""
    start_step: Version | None = None
    """`train`: start from the first source's checkpoint of this version; null: from its start model."""
    tolerance: NonNegative | None = None
    """`verify`: largest difference between weights that passes; null: they must be equal bit for bit."""
    losses: list[Text] = Field(default_factory=list)
    """`compare`: names of losses, two or more."""


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
    """Optimizer steps to simulate of each shown config, after a warm-up; null: at most 100, fewer for large batches."""
    lengths: GivenLengthsConfig | None = None
    """Lengths of prompts and responses; null: those of `sources`, or a guess from `generation.max_new_tokens`."""
