"""Advantages weighed by where the prompt is from."""

import pytest
from support.streams.scored_groups import scored_group

from configs.training import SelectionConfig
from millrace.prompts.packages import PromptSource
from millrace.selection.sources import source_factor
from millrace.training.samples import samples_of

FACTORS = {"chain_sum": 0.5, "leg_counting": 0.0}


def source(task: str) -> str:
    return PromptSource(package="reasoning_gym", name=task, arguments={"size": 5, "seed": 0}).text


@pytest.mark.parametrize(
    ("of_prompt", "factor"),
    [(source("chain_sum"), 0.5), (source("leg_counting"), 0.0), (source("maze"), 1.0), ("train.jsonl", 1.0)],
)
def test_the_factor_is_that_of_the_prompts_task(of_prompt: str, factor: float) -> None:
    assert source_factor(scored_group(0, [[1], [1]], [1.0, 0.0], source=of_prompt), FACTORS) == factor


def test_the_advantages_of_a_task_are_multiplied_by_its_factor() -> None:
    groups = [
        scored_group(n, [[1], [1]], [1.0, 0.0], source=source(task)) for n, task in enumerate(("chain_sum", "maze"))
    ]
    samples = samples_of(groups, "group_mean", 1, SelectionConfig(source_factors=FACTORS))
    assert [sample.advantage for sample in samples] == [0.25, -0.25, 0.5, -0.5]
