"""Which groups and tokens a step trains, and how much they weigh."""

from typing import Literal

from pydantic import Field

from configs.section import Count, NonNegative, Positive, Section


class OverlongConfig(Section):
    """Soft punishment of overlong responses (DAPO, arXiv 2503.14476, §3.4)."""

    buffer_tokens: Count | None = None
    """Over so many tokens before `generation.max_new_tokens` the reward that advantages are made of falls linearly;
    null: it does not depend on the length."""
    factor: Positive = 1.0
    """By how much it has fallen in a response of `generation.max_new_tokens` tokens, in units of the reward."""


class SelectionConfig(Section):
    """Which groups and tokens a step trains, and how much they weigh."""

    drop_zero_advantage: bool = False
    """Whether a group whose rewards are all equal is dropped, and another one is generated in its place (dynamic
    sampling of DAPO, arXiv 2503.14476, §3.2). Not for the advantage `reinforce_plus_plus`, where such a group
    teaches."""
    truncated: Literal["train", "mask"] = "train"
    """What happens to a response that was cut off, at `generation.max_new_tokens` or by the limit of turns. `train`:
    it is trained like any other; `mask`: it carries no loss, and its reward counts in the group's baseline."""
    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    """Punishment of overlong responses. Stored rewards stay as they are."""
    source_factors: dict[str, NonNegative] = Field(default_factory=dict)
    """Factor of the advantages, and with them of the loss, by the task that the prompt is from, such as
    `{chain_sum: 0.5}`; 1 for the others. Only for prompts from `reasoning_gym`."""
