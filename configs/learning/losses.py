"""Parameters of individual losses, each in a section named after its loss."""

from typing import Annotated, Literal

from pydantic import Field

from configs.section import NonNegative, Positive, Section

AtMostOne = Annotated[float, Field(gt=0, le=1)]
AtLeastOne = Annotated[float, Field(ge=1)]
KlEstimator = Literal["k1", "k2", "k3"]


class PpoClipConfig(Section):
    """PPO's clipped objective; its bounds are `training.clip_low` and `training.clip_high`."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Tokens with a negative advantage are also clipped if their ratio is above this, no unit; usually 3; null:
    never."""


class DecoupledPpoConfig(Section):
    """Decoupled PPO; its bounds are `training.clip_low` and `training.clip_high`."""

    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """Policy to clip against: `recomputed`: the policy before the batch's first update; `interpolated`: between the
    policy and the one that sampled, by staleness."""


class TisConfig(Section):
    """Truncated importance sampling."""

    max_importance_ratio: AtLeastOne = 2.0
    """Upper clip C of a token's importance ratio π/μ, no unit."""


class SequenceTisConfig(Section):
    """Truncated importance sampling of whole responses."""

    max_importance_ratio: AtLeastOne = 2.0
    """Upper clip C of the product of a response's importance ratios, no unit."""


class IcePopConfig(Section):
    """IcePop."""

    low: AtMostOne = 0.5
    """Tokens with an importance ratio below this are dropped, no unit."""
    high: AtLeastOne = 5.0
    """Tokens with an importance ratio above this are dropped, no unit."""


class SequenceMaskConfig(Section):
    """Importance sampling with a mask of whole responses."""

    low: AtMostOne = 0.5
    """Responses are dropped if the product of their tokens' importance ratios is below this, no unit."""
    high: AtLeastOne = 2.0
    """Responses are dropped if the product of their tokens' importance ratios is above this, no unit."""


class GeometricMaskConfig(Section):
    """Truncated importance sampling, with a mask of whole responses by their mean importance ratio."""

    low: AtMostOne = 0.1
    """Responses are dropped if the geometric mean of their tokens' importance ratios is below this, no unit. Use 0.999
    and a `high` of 1.001 if generators run exactly the trainer's weights."""
    high: AtLeastOne = 10.0
    """Responses are dropped if the geometric mean of their tokens' importance ratios is above this, no unit."""
    max_importance_ratio: AtLeastOne = 2.0
    """Upper clip C of a token's importance ratio π/μ in responses that are kept, no unit."""


class GspoConfig(Section):
    """Group sequence policy optimisation."""

    clip_low: AtMostOne = 3e-4
    """ε_low: responses with a negative advantage are clipped if the geometric mean of their ratios is below 1 − ε_low,
    no unit; the default is the paper's, for fresh rollouts."""
    clip_high: Positive = 4e-4
    """ε_high: responses with a positive advantage are clipped if the geometric mean of their ratios is above 1 +
    ε_high, no unit; the default is the paper's, for fresh rollouts."""


class SapoConfig(Section):
    """Soft adaptive policy optimisation."""

    tau_positive: Positive = 1.0
    """How fast the gate closes as the ratio moves away from 1, for tokens with a positive advantage, no unit."""
    tau_negative: Positive = 1.05
    """How fast the gate closes as the ratio moves away from 1, for tokens with a negative advantage, no unit."""


class DppoTvConfig(Section):
    """Divergence proximal policy optimisation with total variation."""

    max_divergence: AtMostOne = 0.15
    """δ: tokens are dropped if their probability has moved further than this in the direction of their advantage, no
    unit."""
    max_importance_ratio: AtLeastOne = 20.0
    """Upper clip C of a token's importance ratio π/μ, no unit; a small value hurts learning."""


class LossesConfig(Section):
    """Parameters of individual losses. Parameters that several losses share are keys of `training`."""

    ppo_clip: PpoClipConfig = Field(default_factory=PpoClipConfig)
    """Parameters of the loss `ppo_clip`."""
    decoupled_ppo: DecoupledPpoConfig = Field(default_factory=DecoupledPpoConfig)
    """Parameters of the loss `decoupled_ppo`."""
    tis: TisConfig = Field(default_factory=TisConfig)
    """Parameters of the loss `tis`."""
    sequence_tis: SequenceTisConfig = Field(default_factory=SequenceTisConfig)
    """Parameters of the loss `sequence_tis`."""
    icepop: IcePopConfig = Field(default_factory=IcePopConfig)
    """Parameters of the loss `icepop`."""
    sequence_mask: SequenceMaskConfig = Field(default_factory=SequenceMaskConfig)
    """Parameters of the loss `sequence_mask`."""
    geometric_mask: GeometricMaskConfig = Field(default_factory=GeometricMaskConfig)
    """Parameters of the loss `geometric_mask`."""
    gspo: GspoConfig = Field(default_factory=GspoConfig)
    """Parameters of the loss `gspo`."""
    sapo: SapoConfig = Field(default_factory=SapoConfig)
    """Parameters of the loss `sapo`."""
    dppo_tv: DppoTvConfig = Field(default_factory=DppoTvConfig)
    """Parameters of the loss `dppo_tv`."""


class KlConfig(Section):
    """Penalty for moving away from the reference policy, the run's version 0."""

    coefficient: NonNegative = 0.0
    """Factor of the KL estimate that is added to each token's loss, per nat; 0: no reference policy is loaded."""
    estimator: KlEstimator = "k3"
    """Schulman's estimator of KL(π‖π_ref) from a sampled token: `k2` has the gradient of that divergence; `k3` is
    GRPO's; `k1` has a gradient of mean 0, so it is useful only as a metric."""
    straight_through: bool = False
    """Whether the gradient is that of `k2`, whatever estimator gives the value."""
    importance_weighted: bool = False
    """Whether the estimate is multiplied by the token's importance ratio π/μ, with a gradient of its own, so that it
    holds on stale rollouts too (DeepSeek-V3.2, arXiv 2512.02556)."""


class MasksConfig(Section):
    """Whole responses that carry no loss because π and μ are too far apart in them, whatever the loss; null: none."""

    min_token_ratio: AtMostOne | None = None
    """Responses with a token whose importance ratio π/μ is below this are dropped, no unit; usually 1e-4 to 0.01."""
    max_token_ratio: AtLeastOne | None = None
    """Responses with a token whose importance ratio π/μ is above this are dropped, no unit; usually 10 to 100."""
    max_kl: Positive | None = None
    """Responses whose mean of π/μ − 1 − log π/μ, an estimate of KL(μ‖π), is above this are dropped, nats per token."""
    max_kl_negative: Positive | None = None
    """Responses with a negative advantage whose mean of log μ/π is above this are dropped, nats per token
    (DeepSeek-V3.2, arXiv 2512.02556)."""
