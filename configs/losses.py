"""What single losses have for parameters of their own, by the loss's name."""

from typing import Annotated, Literal

from pydantic import Field

from configs.section import NonNegative, Positive, Section

AtMostOne = Annotated[float, Field(gt=0, le=1)]
AtLeastOne = Annotated[float, Field(ge=1)]


class PpoClipConfig(Section):
    """PPO's clipped objective; its bounds are `training.clip_low` and `clip_high`."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """A token with a negative advantage lets go once its ratio is above this too, no unit; 3 is usual; null: never."""


class DecoupledPpoConfig(Section):
    """Decoupled PPO; its bounds are `training.clip_low` and `clip_high`."""

    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """Policy to clip against: `recomputed`, the one before the step; `interpolated`, between that one and the one that
    sampled, by staleness."""


class TisConfig(Section):
    """Truncated importance sampling."""

    max_importance_ratio: AtLeastOne = 2.0
    """Upper clip of a token's importance ratio π/μ, no unit."""


class IcePopConfig(Section):
    """IcePop."""

    low: AtMostOne = 0.5
    """A token whose importance ratio is below this is dropped, no unit."""
    high: AtLeastOne = 5.0
    """A token whose importance ratio is above this is dropped, no unit."""


class SequenceMaskConfig(Section):
    """Masked importance sampling of whole responses."""

    low: AtMostOne = 0.5
    """A response is dropped whose tokens' importance ratios have a product below this, no unit."""
    high: AtLeastOne = 2.0
    """A response is dropped whose tokens' importance ratios have a product above this, no unit."""


class GeometricMaskConfig(Section):
    """Mask of whole responses by their mean importance ratio, with truncated importance sampling of tokens."""

    low: AtMostOne = 0.1
    """A response is dropped whose tokens' importance ratios have a geometric mean below this, no unit; 0.999 and a
    `high` of 1.001 are for generators that run the trainer's own weights."""
    high: AtLeastOne = 10.0
    """A response is dropped whose tokens' importance ratios have a geometric mean above this, no unit."""
    max_importance_ratio: AtLeastOne = 2.0
    """Upper clip of a token's importance ratio π/μ in the responses that are kept, no unit."""


class GspoConfig(Section):
    """Group sequence policy optimisation."""

    clip_low: AtMostOne = 3e-4
    """A response with a negative advantage lets go once the geometric mean of its ratios is below 1 less this, no
    unit; the default is the paper's, for fresh rollouts."""
    clip_high: Positive = 4e-4
    """A response with a positive advantage lets go once the geometric mean of its ratios is above 1 plus this, no unit;
    the default is the paper's, for fresh rollouts."""


class SapoConfig(Section):
    """Soft adaptive policy optimisation."""

    tau_positive: Positive = 1.0
    """How soon the gate closes on tokens with a positive advantage as their ratio leaves 1, no unit."""
    tau_negative: Positive = 1.05
    """How soon the gate closes on tokens with a negative advantage as their ratio leaves 1, no unit."""


class DppoTvConfig(Section):
    """Divergence proximal policy optimisation, by total variation."""

    max_divergence: AtMostOne = 0.15
    """A token lets go once its probability has moved further than this the way its advantage wants, no unit."""
    max_importance_ratio: AtLeastOne = 20.0
    """Upper clip of a token's importance ratio π/μ, no unit; a small one hurts."""


class LossesConfig(Section):
    """Parameters that one loss alone has. Those that several share are keys of `training`."""

    ppo_clip: PpoClipConfig = Field(default_factory=PpoClipConfig)
    """Of the loss `ppo_clip`."""
    decoupled_ppo: DecoupledPpoConfig = Field(default_factory=DecoupledPpoConfig)
    """Of the loss `decoupled_ppo`."""
    tis: TisConfig = Field(default_factory=TisConfig)
    """Of the loss `tis`."""
    icepop: IcePopConfig = Field(default_factory=IcePopConfig)
    """Of the loss `icepop`."""
    sequence_mask: SequenceMaskConfig = Field(default_factory=SequenceMaskConfig)
    """Of the loss `sequence_mask`."""
    geometric_mask: GeometricMaskConfig = Field(default_factory=GeometricMaskConfig)
    """Of the loss `geometric_mask`."""
    gspo: GspoConfig = Field(default_factory=GspoConfig)
    """Of the loss `gspo`."""
    sapo: SapoConfig = Field(default_factory=SapoConfig)
    """Of the loss `sapo`."""
    dppo_tv: DppoTvConfig = Field(default_factory=DppoTvConfig)
    """Of the loss `dppo_tv`."""


class KlConfig(Section):
    """A penalty for leaving the reference policy, the run's version 0."""

    coefficient: NonNegative = 0.0
    """What the estimate is multiplied with before it is added to each token's loss, per nat; 0 keeps no reference."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of KL(π‖π_ref) from a sampled token: `k2` has that divergence's gradient, `k3` is GRPO's,
    `k1` has a gradient of mean 0 and serves as a measure only."""
