"""The prompts a run's config names, for every stage that asks or judges them."""

from configs.schema import RunConfig
from millrace.prompts import PromptSet, load_prompts


def load_prompt_set(config: RunConfig) -> PromptSet:
    """Training and held-out prompts, disjoint. Raises PromptsError."""
    prompts = config.prompts
    return load_prompts(
        source=prompts.source,
        eval_source=prompts.eval_source,
        prompt_field=prompts.prompt_field,
        answer_field=prompts.answer_field,
        digits=prompts.arithmetic.digits,
        max_sum=prompts.arithmetic.max_sum,
        num_eval=prompts.num_eval,
    )
