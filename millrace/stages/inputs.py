"""The prompts a run's config names, for every stage that asks or judges them."""

from collections.abc import Mapping
from typing import Any

from configs.schema import RunConfig
from millrace.prompts import PromptSet, load_prompts


def load_prompt_set(config: RunConfig) -> PromptSet:
    """Training and held-out prompts, disjoint. Raises InputError."""
    prompts = config.prompts
    return load_prompts(
        source=prompts.source,
        eval_source=prompts.eval_source,
        prompt_field=prompts.prompt_field,
        answer_field=prompts.answer_field,
        digits=prompts.arithmetic.digits,
        max_sum=prompts.arithmetic.max_sum,
        num_eval=prompts.num_eval,
        answer_format=prompts.answer_format,
        template=prompts.template,
        package_options=package_options(config),
    )


def package_options(config: RunConfig) -> Mapping[str, Mapping[str, Any]]:
    """What each package that lists prompts is asked for, by the package's name: plain JSON."""
    prompts = config.prompts
    return {"reasoning_gym": prompts.reasoning_gym.model_dump(), "verifiers": prompts.verifiers.model_dump()}
