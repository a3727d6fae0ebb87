"""Prompts that other packages list: the same in every process, named so that a reward finds their entry again."""

import importlib.util
from typing import Any

import pytest

from configs.prompts import PromptsConfig, ReasoningGymConfig
from millrace.errors import MissingExtra, PromptsError
from millrace.prompts.dataset import load_prompts
from millrace.prompts.extras import check_installed
from millrace.prompts.listing import listed_prompts
from millrace.prompts.source import PromptSource, index_of, prompt_sources
from millrace.types import Prompt

pytestmark = pytest.mark.slow

GYM = {"size": 20, "seed": 7, "config": {"chain_sum": {"max_terms": 2, "max_digits": 1}}}

needs_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning_gym is not installed"
)
needs_verifiers = pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed")


# --- names


def test_the_text_of_a_source_is_parsed_back() -> None:
    [chain_sum, gcd] = prompt_sources("reasoning_gym:chain_sum,gcd", GYM)
    assert chain_sum.text == 'reasoning_gym:chain_sum {"max_digits": 1, "max_terms": 2, "seed": 7, "size": 20}'
    assert gcd.text == 'reasoning_gym:gcd {"seed": 7, "size": 20}'
    [sums] = prompt_sources("verifiers:me/sums#eval", {"arguments": {"words": "two words"}})
    assert sums == PromptSource(package="verifiers", name="me/sums#eval", arguments={"words": "two words"})
    for source in (chain_sum, gcd, sums):
        assert PromptSource.parse(source.text) == source


def test_a_prompts_place_is_the_end_of_its_id() -> None:
    assert index_of(Prompt(prompt_id="a:b:17", text="", answer="", source="")) == 17


def test_a_prompt_of_a_file_is_not_from_a_package() -> None:
    with pytest.raises(ValueError, match=r'the prompt is from "gsm8k\.jsonl"; expected one from a package'):
        PromptSource.parse("gsm8k.jsonl")


# --- reasoning_gym


@needs_gym
def test_tasks_of_reasoning_gym_give_so_many_problems_each() -> None:
    prompts = listed_prompts("reasoning_gym:chain_sum,gcd", GYM)
    assert [prompt.prompt_id for prompt in prompts] == [
        f"{task}:{n}" for task in ("chain_sum", "gcd") for n in range(20)
    ]
    for prompt in prompts[:20]:
        terms = prompt.text.removesuffix(" =").rpartition(": ")[2]
        a, sign, b = terms.split()
        assert prompt.answer == str(int(a) + int(b) if sign == "+" else int(a) - int(b))


@needs_gym
def test_every_task_makes_the_same_problems_in_every_process() -> None:
    from reasoning_gym.factory import DATASETS

    # Loaded without arguments it makes nothing.
    tasks = ",".join(sorted(set(DATASETS) - {"composite"}))
    options = {"size": 2, "seed": 1, "config": {}}
    first = listed_prompts(f"reasoning_gym:{tasks}", options)
    backwards = ",".join(reversed(tasks.split(",")))
    assert sorted(first, key=lambda prompt: prompt.prompt_id) == sorted(
        listed_prompts(f"reasoning_gym:{backwards}", options), key=lambda prompt: prompt.prompt_id
    )
    assert len(first) == 2 * len(tasks.split(","))


@needs_gym
def test_no_problem_is_both_trained_on_and_held_out() -> None:
    gym = ReasoningGymConfig(**{**GYM, "size": 200})
    prompts = load_prompts(PromptsConfig(source="reasoning_gym:chain_sum", num_eval=20, reasoning_gym=gym))
    assert len(prompts.eval) == 20
    assert prompts.train
    assert not {prompt.text for prompt in prompts.train} & {prompt.text for prompt in prompts.eval}


@needs_gym
@pytest.mark.parametrize(
    ("source", "config", "sentence"),
    [
        (
            "reasoning_gym:chian_sum",
            {},
            'prompts source "reasoning_gym:chian_sum": there is no such task; did you mean chain_sum or '
            "decimal_chain_sum?",
        ),
        (
            "reasoning_gym:xyzzy",
            {},
            'prompts source "reasoning_gym:xyzzy": there is no such task; expected one such as chain_sum, countdown, '
            "gsm_symbolic",
        ),
        (
            "reasoning_gym:gcd,gcd",
            {},
            'prompts source "reasoning_gym:gcd,gcd" names a task twice; expected each once',
        ),
        (
            "reasoning_gym:chain_sum",
            {"chain_sum": {"max_digits": 0}},
            'prompts.reasoning_gym.config of "chain_sum" is refused by the task: max_digits must be >= min_digits',
        ),
        (
            "reasoning_gym:chain_sum",
            {"chain_sum": {"digits": 1}},
            'prompts.reasoning_gym.config of "chain_sum" is refused by the task: ChainSumConfig.__init__() got an '
            "unexpected keyword argument 'digits'",
        ),
    ],
    ids=["near", "far", "twice", "out of bounds", "unknown argument"],
)
def test_a_task_that_can_not_be_made_is_refused_in_one_sentence(
    source: str, config: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(PromptsError) as caught:
        listed_prompts(source, {"size": 3, "seed": 0, "config": config})
    assert str(caught.value) == sentence


# --- verifiers


SUMS = "verifiers:tests.support.rewards.sums_environment"


@needs_verifiers
def test_a_single_turn_environment_gives_its_rows() -> None:
    prompts = listed_prompts(SUMS, {"arguments": {"num": 3}})
    assert prompts == [
        Prompt(
            prompt_id=f"tests.support.rewards.sums_environment:{n}",
            text=f"Be brief.\n\n{n} + 1 = ?",
            answer=str(n + 1),
            source='verifiers:tests.support.rewards.sums_environment {"num": 3}',
            messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{n} + 1 = ?"}),
        )
        for n in range(3)
    ]


@needs_verifiers
def test_its_evaluation_set_is_a_source_of_its_own() -> None:
    prompts = listed_prompts(f"{SUMS}#eval", {"arguments": {}})
    assert [prompt.prompt_id for prompt in prompts] == [
        f"tests.support.rewards.sums_environment#eval:{n}" for n in range(2)
    ]


@needs_verifiers
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("verifiers:no-such-thing", {}, "Could not import 'no-such-thing' environment"),
        (SUMS, {"nom": 3}, "unexpected keyword argument 'nom'"),
        (SUMS, {"turns": 3}, "is a ToolEnv; expected a SingleTurnEnv"),
    ],
    ids=["unknown", "unknown argument", "several turns"],
)
def test_an_environment_that_can_not_be_asked_is_refused_in_one_sentence(
    name: str, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(PromptsError) as caught:
        listed_prompts(name, {"arguments": arguments})
    assert str(caught.value).startswith(f'prompts source "{name}"')
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# --- any package


def test_a_package_that_is_not_installed_is_named_with_the_extra_that_brings_it() -> None:
    with pytest.raises(MissingExtra) as caught:
        check_installed("no_such_package", "puzzles", "prompts.source no_such_package:all")
    assert (caught.value.package, caught.value.extra) == ("no_such_package", "puzzles")
    assert "'.[puzzles]'" in str(caught.value)
