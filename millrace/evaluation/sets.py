"""The evaluation sets of a run: its held-out prompts, and the further ones of `evaluation.sets`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from configs.prompts import EvaluationConfig, PromptsConfig
from millrace.evaluation.results import HELD_OUT
from millrace.prompts.dataset import PromptSet, load_source
from millrace.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSet:
    """Prompts that a version is measured on."""

    prompts: Sequence[Prompt]
    """At least one."""
    samples: int
    """Answers sampled per prompt, besides the greedy one; 1: only the greedy one."""


def evaluation_sets(
    evaluation: EvaluationConfig, config: PromptsConfig, prompts: PromptSet
) -> dict[str, EvaluationSet]:
    """The configured sets by name, the held-out ones of `prompts` first. Raises InputError as `load_prompts` does."""
    sets = {HELD_OUT: EvaluationSet(prompts=prompts.eval, samples=evaluation.samples)}
    for name, one in evaluation.sets.items():
        found = load_source(one.source, config)[: one.num_prompts]
        sets[name] = EvaluationSet(prompts=tuple(found), samples=one.samples)
    return sets


def all_asked(prompts: PromptSet, sets: Mapping[str, EvaluationSet]) -> PromptSet:
    """`prompts` with those of the further sets among its evaluation prompts: everything that the policy is asked."""
    further = [prompt for name, one in sets.items() if name != HELD_OUT for prompt in one.prompts]
    return replace(prompts, eval=(*prompts.eval, *further))
