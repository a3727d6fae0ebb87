"""Names that one section gives and another one must know: sources, teachers, tasks and rewards."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from configs.checks.rule import where_set
from configs.errors import UserError
from configs.task import HELD_OUT

if TYPE_CHECKING:
    from configs.schema import RunConfig


def penalties_without_reference(config: "RunConfig") -> Iterator[UserError]:
    """Yield a mistake for each source with a KL penalty in a run that loads no reference policy."""
    for name, source in config.by_source().items():
        if source.training.kl.coefficient and not config.training.kl.coefficient:
            expected = "0, or a training.kl.coefficient above 0: without it the run loads no reference policy"
            key = f"sources.{name}.training.kl.coefficient"
            yield UserError(key=key, read=str(source.training.kl.coefficient), expected=expected)


def wrong_names(config: "RunConfig") -> Iterator[UserError]:
    """Yield a mistake for each name of a source that contradicts the run's other settings."""
    names = config.by_source().keys()
    for name in config.evaluation.weights:
        if name not in names:
            expected = f"sources of the run: {', '.join(names)}"
            yield UserError(key="evaluation.weights", read=f"set for {name}, which is not a source", expected=expected)
    own = [source.scoring.replicas for source in config.sources.values()]
    if config.sources and None not in own:
        expected = "null for one source at least, because the run's own scorers need work"
        yield UserError(
            key=f"sources.{next(iter(config.sources))}.scoring.replicas", read=str(own[0]), expected=expected
        )
    if HELD_OUT in config.sources:
        expected = "another name, because results of evaluations name the accuracy over all sources so"
        yield UserError(key=f"sources.{HELD_OUT}", read="a source", expected=expected)


def wrong_teachers(config: "RunConfig") -> Iterator[UserError]:
    """Yield a mistake for each teacher that is used and not there, or there and not used."""
    used: set[str] = set()
    for name, source in config.by_source().items():
        if (teacher := source.training.distillation.teacher) is None:
            continue
        used.add(teacher)
        if teacher not in config.teachers:
            expected = (
                f"one of {', '.join(config.teachers)}" if config.teachers else "a teacher of the section teachers"
            )
            key = where_set(config, name, "training.distillation.teacher")
            yield UserError(key=key, read=json.dumps(teacher), expected=expected)
    for name in config.teachers.keys() - used:
        expected = "a source with it as training.distillation.teacher, or no such teacher"
        yield UserError(key=f"teachers.{name}", read="a teacher of no source", expected=expected)


def prompt_sources(config: "RunConfig") -> list[str]:
    """Where a source of the run has all its prompts from."""
    prompts, sets = config.prompts, config.evaluation.sets.values()
    return [prompts.source, *filter(None, [prompts.eval_source]), *(each.source for each in sets)]


def unasked_tasks(config: "RunConfig") -> Iterator[UserError]:
    """Settings by task of `reasoning_gym` whose task no prompt of any source is from."""
    configs = config.by_source().values()
    training_only = [each.prompts.source for each in configs]
    evaluation_too = [source for each in configs for source in prompt_sources(each)]
    arguments = {task for each in configs for task in each.prompts.reasoning_gym.config}
    for key, names, sources in (
        ("prompts.reasoning_gym.config", arguments, evaluation_too),
        ("training.selection.source_factors", config.training.selection.source_factors, training_only),
    ):
        lists = (source.removeprefix("reasoning_gym:") for source in sources if source.startswith("reasoning_gym:"))
        for task in set(names) - set(",".join(lists).split(",")):
            yield UserError(
                key=key,
                read=f"set for {task} and prompts.source is {' and '.join(map(json.dumps, training_only))}",
                expected=f"a task in use, reasoning_gym:{task}",
            )


def half_schedules(config: "RunConfig") -> Iterator[UserError]:
    """Weights of sources that would change at no time, or to no weight."""
    for name, source in config.sources.items():
        for key, other in (("final_weight", "weight_steps"), ("weight_steps", "final_weight")):
            if getattr(source, key) is None and getattr(source, other) is not None:
                yield UserError(
                    key=f"sources.{name}.{other}",
                    read=f"{getattr(source, other)} and sources.{name}.{key} is null",
                    expected=f"{key} with it, or null for both",
                )


def rewards_without_entries(run: "RunConfig", name: str, config: "RunConfig") -> Iterator[UserError]:
    """Yield a mistake for each reward of a source that looks its prompts up in another package's data set."""
    for reward in {config.scoring.reward, *config.scoring.weights} & {"reasoning_gym", "verifiers"}:
        # A stored run keeps the source of each prompt.
        for source in () if config.prompts.demonstrations else prompt_sources(config):
            if not source.startswith(f"{reward}:"):
                yield UserError(
                    key=where_set(run, name, "scoring.reward"),
                    read=f'"{reward}" and prompts are from {source}',
                    expected=f"prompts made by {reward}",
                )
