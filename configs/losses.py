"""Losses and their parameters, the KL penalty, and masks that any loss may have.

`training.loss` is one of the classes here, chosen by its `name`: `{name: gspo, clip_low: 3.0e-4}`, or the name alone.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from configs.section import NonNegative, Parameters, Positive, Section, one_of_or_path

AtMostOne = Annotated[float, Field(gt=0, le=1)]
AtLeastOne = Annotated[float, Field(ge=1)]
KlEstimator = Literal["k1", "k2", "k3"]


class AipoConfig(Parameters):
    """AIPO, the default: the importance ratio π/μ of each token, clipped from above."""

    name: Literal["aipo"] = "aipo"
    max_importance_ratio: AtLeastOne = 4.0
    """Upper clip ρ of a token's importance ratio π/μ, no unit; usually 2 to 10."""


class PlainConfig(Parameters):
    """Losses without parameters."""

    name: Literal["reinforce", "topr", "cross_entropy"]


class _ClippedConfig(Parameters):
    clip_low: AtMostOne = 0.2
    """Tokens with a negative advantage are clipped if their ratio is below 1 − `clip_low`, no unit."""
    clip_high: Positive = 0.2
    """Tokens with a positive advantage are clipped if their ratio is above 1 + `clip_high`, no unit."""


class PpoClipConfig(_ClippedConfig):
    """PPO's clipped objective."""

    name: Literal["ppo_clip"] = "ppo_clip"
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Tokens with a negative advantage are also clipped if their ratio is above this, no unit; usually 3; null:
    never."""


class DecoupledPpoConfig(_ClippedConfig):
    """Decoupled PPO, whose ratio for clipping is to the proximal policy."""

    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """Policy to clip against: `recomputed`: the policy before the batch's first update; `interpolated`: between the
    policy and the one that sampled, by staleness."""


class TruncatedConfig(Parameters):
    """Truncated importance sampling, of tokens (`tis`) or of whole responses (`sequence_tis`)."""

    name: Literal["tis", "sequence_tis"]
    max_importance_ratio: AtLeastOne = 2.0
    """Upper clip C of a token's importance ratio π/μ, or of the product of a response's, no unit."""


class IcePopConfig(Parameters):
    """IcePop."""

    name: Literal["icepop"] = "icepop"
    low: AtMostOne = 0.5
    """Tokens with an importance ratio below this are dropped, no unit."""
    high: AtLeastOne = 5.0
    """Tokens with an importance ratio above this are dropped, no unit."""


class SequenceMaskConfig(Parameters):
    """Importance sampling with a mask of whole responses."""

    name: Literal["sequence_mask"] = "sequence_mask"
    low: AtMostOne = 0.5
    """Responses are dropped if the product of their tokens' importance ratios is below this, no unit."""
    high: AtLeastOne = 2.0
    """Responses are dropped if the product of their tokens' importance ratios is above this, no unit."""


class GeometricMaskConfig(Parameters):
    """Truncated importance sampling, with a mask of whole responses by their mean importance ratio."""

    name: Literal["geometric_mask"] = "geometric_mask"
    low: AtMostOne = 0.1
    """Responses are dropped if the geometric mean of their tokens' importance ratios is below this, no unit. Use 0.999
    and a `high` of 1.001 if generators run exactly the trainer's weights."""
    high: AtLeastOne = 10.0
    """Responses are dropped if the geometric mean of their tokens' importance ratios is above this, no unit."""
    max_importance_ratio: AtLeastOne = 2.0
    """Upper clip C of a token's importance ratio π/μ in responses that are kept, no unit."""


class CispoConfig(Parameters):
    """Clipped importance-sampling policy optimization."""

    name: Literal["cispo"] = "cispo"
    clip_high: Positive = 0.2
    """The maximum weight of a token is 1 + `clip_high`, no unit."""


class GspoConfig(Parameters):
    """Group sequence policy optimization."""

    name: Literal["gspo"] = "gspo"
    clip_low: AtMostOne = 3e-4
    """ε_low: responses with a negative advantage are clipped if the geometric mean of their ratios is below 1 − ε_low,
    no unit; the default is the paper's, for fresh rollouts."""
    clip_high: Positive = 4e-4
    """ε_high: responses with a positive advantage are clipped if the geometric mean of their ratios is above 1 +
    ε_high, no unit; the default is the paper's, for fresh rollouts."""


class SapoConfig(Parameters):
    """Soft adaptive policy optimization."""

    name: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    """How fast the gate closes as the ratio moves away from 1, for tokens with a positive advantage, no unit."""
    tau_negative: Positive = 1.05
    """How fast the gate closes as the ratio moves away from 1, for tokens with a negative advantage, no unit."""


class DppoTvConfig(Parameters):
    """Divergence proximal policy optimization with total variation."""

    name: Literal["dppo_tv"] = "dppo_tv"
    max_divergence: AtMostOne = 0.15
    """δ: tokens are dropped if their probability has moved further than this in the direction of their advantage, no
    unit."""
    max_importance_ratio: AtLeastOne = 20.0
    """Upper clip C of a token's importance ratio π/μ, no unit; a small value hurts learning."""


BUILT_IN, OWN = "built_in", "own"
"""Where a loss is from. Pydantic puts this, and the name of a built-in one, into the place of an error."""
_BuiltIn = Annotated[
    AipoConfig
    | PlainConfig
    | PpoClipConfig
    | DecoupledPpoConfig
    | TruncatedConfig
    | IcePopConfig
    | SequenceMaskConfig
    | GeometricMaskConfig
    | CispoConfig
    | GspoConfig
    | SapoConfig
    | DppoTvConfig,
    Discriminator("name"),
]
PARAMETERS: dict[str, type[Parameters]] = {
    name: kind for kind in get_args(get_args(_BuiltIn)[0]) for name in get_args(kind.model_fields["name"].annotation)
}
LOSS_NAMES = tuple(PARAMETERS)
"""The losses that come with Millrace."""


class OwnLossConfig(Parameters):
    """A loss of your own."""

    name: Annotated[str, AfterValidator(one_of_or_path(LOSS_NAMES))]
    """Its import path, `package.module:function`."""


def _with_name(value: Any) -> Any:
    """A loss that is named alone has its defaults; one without a name is `aipo`."""
    if isinstance(value, str):
        return {"name": value}
    return {"name": "aipo", **value} if isinstance(value, dict) else value


def _origin(value: Any) -> str | None:
    if not isinstance(value, dict | Parameters):
        return None
    name = value["name"] if isinstance(value, dict) else getattr(value, "name", None)
    return BUILT_IN if name in LOSS_NAMES else OWN


LossConfig = Annotated[
    Annotated[_BuiltIn, Tag(BUILT_IN)] | Annotated[OwnLossConfig, Tag(OWN)],
    Discriminator(_origin),
    # In a deployment's form: a name, or a JSON object.
    BeforeValidator(_with_name, json_schema_input_type=str | dict[str, Any]),
]
"""One of the losses, with its parameters."""


class KlConfig(Section):
    """Penalty for moving away from the reference policy, the run's version 0."""

    coefficient: NonNegative = 0.0
    """Factor of the KL estimate that is added to each token's loss, per nat; 0: no reference policy is loaded."""
    estimator: KlEstimator = "k3"
    """Schulman's estimator of KL(π‖π_ref) from a sampled token: `k2` has the gradient of that divergence; `k3` is
    GRPO's; `k1` has a gradient of mean 0, so it is useful only as a metric."""
    importance_weighted: bool = False
    """Whether the estimate is multiplied by the token's importance ratio π/μ, which has a gradient too, so that it
    holds on stale rollouts (DeepSeek-V3.2, arXiv 2512.02556)."""


class MasksConfig(Section):
    """Masks whole responses in which π and μ are too far apart, whatever the loss; null: none."""

    min_token_ratio: AtMostOne | None = None
    """Responses with a token whose importance ratio π/μ is below this are dropped, no unit; usually 1e-4 to 0.01."""
    max_token_ratio: AtLeastOne | None = None
    """Responses with a token whose importance ratio π/μ is above this are dropped, no unit; usually 10 to 100."""
    max_kl: Positive | None = None
    """Responses whose mean of π/μ − 1 − log π/μ, an estimate of KL(μ‖π), is above this are dropped, nats per token."""
    max_kl_negative: Positive | None = None
    """Responses with a negative advantage whose mean of log μ/π is above this are dropped, nats per token
    (DeepSeek-V3.2, arXiv 2512.02556)."""
