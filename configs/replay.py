"""What a person asks of a replay: which stored runs, what to do with them, and where the replay's own run lies."""

from typing import Annotated, Literal

from pydantic import Field

from configs.section import NonNegative, Positive, Section, Text

Version = Annotated[int, Field(ge=0)]


class ReplayRequest(Section):
    """One replay; nothing of the stored runs is ever changed."""

    sources: Annotated[list[Text], Field(min_length=1)]
    """Folders or URLs of stored runs, each root/run id; more than one only to train."""
    shares: list[Positive] = Field(default_factory=list)
    """How much of every batch comes from each source, in proportion to each other; empty: equal shares."""
    job: Literal["verify", "train", "compare"] | None = None
    """`verify`: train the original batches again and compare; `train`: train anew; `compare`: several losses on the
    same batches, without training; null: only score anew."""
    rescore: Text | None = None
    """Name of a reward to score the stored trajectories with; a `train` after it uses these scores."""
    run_id: Text
    """The replay's own folder under `root`."""
    root: Text = "runs"
    """Folder or URL under which the replay's run lies."""
    settings: list[str] = Field(default_factory=list)
    """Keys of the first source's config to change, each `section.key=value`, such as `training.learning_rate=1e-4`."""
    from_step: Version | None = None
    """Optimizer step of the stored run to begin at; `verify` starts from the checkpoint of that version, and `train`
    and `compare` leave out the batches before it."""
    to_step: Version | None = None
    """Optimizer step of the stored run to end with; null: its last."""
    where: Text | None = None
    """SQL condition on the stored groups, such as `reward_mean > 0 and generator = 1`; docs/replay.md lists the
    columns."""
    max_staleness: Version | None = None
    """Leave out groups that were staler than this when they were trained, policy versions."""
    dropped: bool = False
    """`train`: also take groups that were dropped as stale."""
    order: Literal["stored", "shuffled"] = "stored"
    """`train`: the groups in the order in which they were trained, or in a new one drawn from `seed`."""
    start_step: Version | None = None
    """`train`: begin with the first source's checkpoint of this version; null: with its start model."""
    tolerance: NonNegative | None = None
    """`verify`: largest difference between weights that passes; null: they must be the same bit for bit."""
    losses: list[Text] = Field(default_factory=list)
    """`compare`: names of losses, two or more."""
    own_copies: bool = False
    """`compare`: let each loss train a copy of the policy of its own."""
