"""The sources of a mixture: each has a share of the groups, and settings that replace those of the run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, TypeVar

from pydantic import Field

from configs.errors import UserError
from configs.generation import SamplingConfig
from configs.section import Count, Positive, Section, is_section
from configs.stored import DEFAULT_SOURCE
from configs.task import EnvironmentConfig, EvaluationSetsConfig, PromptsConfig, RewardConfig
from configs.training import ObjectiveConfig


class SourceConfig(Section):
    """A source of a mixture. Each of its sections has keys of the run's section; those left out are as in the run."""

    weight: Positive = 1.0
    """Share of the groups, relative to the weights of the other sources."""
    final_weight: Positive | None = None
    """Weight from `weight_steps` on, reached in equal steps; null: `weight` throughout."""
    weight_steps: Count | None = None
    """Optimizer steps from `weight` to `final_weight`."""
    solved_at: Annotated[float, Field(gt=0, le=1)] | None = None
    """The source has a quarter of its weight while at least this share of its responses is right (a reward of 1 or
    more), among those of the last ten steps; null: it never gives way."""
    prompts: PromptsConfig = Field(default_factory=PromptsConfig)
    generation: SamplingConfig = Field(default_factory=SamplingConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    scoring: RewardConfig = Field(default_factory=RewardConfig)
    training: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    evaluation: EvaluationSetsConfig = Field(default_factory=EvaluationSetsConfig)


SECTIONS = tuple(name for name, field in SourceConfig.model_fields.items() if is_section(field.annotation))
"""Sections of the run whose keys a source may set for itself."""
_KEYS = {name: SourceConfig.model_fields[name].annotation.model_fields.keys() for name in SECTIONS}  # type: ignore[union-attr]
_SettingsT = TypeVar("_SettingsT", bound=Section)


def overlaid(settings: _SettingsT, own: Section) -> _SettingsT:
    """`settings` with the values that are set in `own`, section by section; another loss replaces the run's whole."""
    changes = {}
    for name in own.model_fields_set:
        value, below = getattr(own, name), getattr(settings, name)
        changes[name] = (
            overlaid(below, value) if isinstance(value, Section) and isinstance(below, type(value)) else value
        )
    return settings.model_copy(update=changes)


def key_in(source: str, key: str) -> str:
    """The name of a run's key in a source: `sources.NAME.prompts.source`; the key itself if sources don't have it."""
    section, name, *_ = *key.split("."), ""
    if source == DEFAULT_SOURCE or section not in SECTIONS or name not in _KEYS[section]:
        return key
    return f"sources.{source}.{key}"


def name_source(error: UserError, source: str) -> None:
    """Has the error name the source that the mistake is in."""
    if error.key is not None:
        error.key = key_in(source, error.key)
    elif source != DEFAULT_SOURCE:
        error.file = f"source {source}" if error.file is None else f"source {source}: {error.file}"


@contextmanager
def naming_source(source: str) -> Iterator[None]:
    """Has errors of users that are raised in the block name the source."""
    try:
        yield
    except UserError as error:
        name_source(error, source)
        raise
