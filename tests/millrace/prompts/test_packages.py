"""Prompts that other packages list: the same in every process, named so that a reward finds their entry again."""

import importlib.util
from typing import Any

import pytest

from configs.task import PromptsConfig, ReasoningGymConfig, VerifiersConfig
from millrace.errors import MissingExtra, PromptsError
from millrace.prompts.packages import PromptSource, check_installed, index_of, listed_prompts, prompt_sources
from millrace.types import Prompt

pytestmark = pytest.mark.slow

GYM = ReasoningGymConfig(size=20, config={"chain_sum": {"max_terms": 2, "max_digits": 1}})

needs_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning_gym is not installed"
)
needs_verifiers = pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed")


def listed(source: str, gym: ReasoningGymConfig = GYM, **arguments: Any) -> list[Prompt]:
    config = PromptsConfig(reasoning_gym=gym, verifiers=VerifiersConfig(arguments=arguments))
    return listed_prompts(prompt_sources(source, config))


# --- names


def test_the_text_of_a_source_is_parsed_back() -> None:
    config = PromptsConfig(reasoning_gym=GYM, verifiers=VerifiersConfig(arguments={"words": "two words"}))
    [chain_sum, gcd] = prompt_sources("reasoning_gym:chain_sum,gcd", config)
    assert chain_sum.text == 'reasoning_gym:chain_sum {"max_digits": 1, "max_terms": 2, "seed": 0, "size": 20}'
    assert gcd.text == 'reasoning_gym:gcd {"seed": 0, "size": 20}'
    [sums] = prompt_sources("verifiers:me/sums#eval", config)
    assert sums == PromptSource(package="verifiers", name="me/sums#eval", arguments={"words": "two words"})
    for source in (chain_sum, gcd, sums):
        assert PromptSource.parse(source.text) == source
    assert index_of(Prompt(prompt_id="a:b:17", text="", answer="", source="")) == 17
    assert prompt_sources("gsm8k.jsonl", config) == []
    with pytest.raises(ValueError):
        PromptSource.parse("gsm8k.jsonl")


# --- reasoning_gym


@needs_gym
def test_tasks_of_reasoning_gym_give_so_many_problems_each() -> None:
    prompts = listed("reasoning_gym:chain_sum,gcd")
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
    gym = ReasoningGymConfig(size=2)
    first = listed(f"reasoning_gym:{tasks}", gym)
    backwards = ",".join(reversed(tasks.split(",")))
    assert sorted(first, key=lambda prompt: prompt.prompt_id) == sorted(
        listed(f"reasoning_gym:{backwards}", gym), key=lambda prompt: prompt.prompt_id
    )
    assert len(first) == 2 * len(tasks.split(","))


@needs_gym
@pytest.mark.parametrize(
    ("source", "config", "said"),
    [
        ("chian_sum", {}, "expected chain_sum or decimal_chain_sum"),
        ("xyzzy", {}, "expected one such as chain_sum"),
        ("gcd,gcd", {}, "expected each task once"),
        ("chain_sum", {"chain_sum": {"max_digits": 0}}, "max_digits must be >= min_digits"),
        ("chain_sum", {"chain_sum": {"digits": 1}}, "unexpected keyword argument 'digits'"),
    ],
)
def test_a_task_that_can_not_be_made_is_refused_in_one_line(source: str, config: dict[str, Any], said: str) -> None:
    with pytest.raises(PromptsError) as caught:
        listed(f"reasoning_gym:{source}", ReasoningGymConfig(size=3, config=config))
    line = str(caught.value)
    assert source in line
    assert said in line
    assert len(line.splitlines()) == 1


# --- verifiers


SUMS = "verifiers:tests.support.rewards.sums_environment"


@needs_verifiers
def test_a_single_turn_environment_gives_its_rows() -> None:
    prompts = listed(SUMS, num=3)
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
    prompts = listed(f"{SUMS}#eval")
    assert [prompt.prompt_id for prompt in prompts] == [
        f"tests.support.rewards.sums_environment#eval:{n}" for n in range(2)
    ]


@needs_verifiers
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("verifiers:no-such-thing", {}, "Could not import 'no-such-thing' environment"),
        (SUMS, {"nom": 3}, "unexpected keyword argument 'nom'"),
        (SUMS, {"turns": 3}, ", a ToolEnv; expected a SingleTurnEnv"),
    ],
    ids=["unknown", "unknown argument", "several turns"],
)
def test_an_environment_that_can_not_be_loaded_is_refused_in_one_line(
    name: str, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(PromptsError) as caught:
        listed(name, **arguments)
    assert caught.value.key == "prompts.source"
    assert name in caught.value.read
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# --- any package


def test_a_package_that_is_not_installed_is_named_with_the_extra_that_brings_it() -> None:
    with pytest.raises(MissingExtra) as caught:
        check_installed("no_such_package", "puzzles", "prompts.source no_such_package:all")
    assert (caught.value.package, caught.value.extra) == ("no_such_package", "puzzles")
    assert "'.[puzzles]'" in str(caught.value)
