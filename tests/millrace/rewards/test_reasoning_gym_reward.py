"""The reward of a `reasoning_gym` task: its own verifier, on the entry that the prompt was made from."""

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import pytest

from configs.prompts import PromptsConfig, ReasoningGymConfig
from configs.scoring import ScoringConfig
from millrace.prompts.packages import listed_prompts, prompt_sources
from millrace.rewards.factory import make_reward
from millrace.rewards.scorer import Scorer
from millrace.types import Prompt

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning_gym is not installed"
)

SOURCE = "reasoning_gym:chain_sum,graph_color,isomorphic_strings"
GYM = ReasoningGymConfig(size=4, config={"chain_sum": {"max_digits": 1}})


@pytest.fixture(scope="module")
def prompts() -> dict[str, Prompt]:
    config = PromptsConfig(reasoning_gym=GYM)
    return {prompt.prompt_id: prompt for prompt in listed_prompts(prompt_sources(SOURCE, config))}


@pytest.fixture(scope="module")
def scorer(prompts: dict[str, Prompt]) -> Iterator[Scorer]:
    sources = sorted({prompt.source for prompt in prompts.values()})
    with Scorer(make_reward(ScoringConfig(reward="reasoning_gym", answer_pattern="#([^#]*)#"), sources)) as scorer:
        yield scorer


@pytest.mark.slow
def test_the_task_itself_says_what_is_right(prompts: dict[str, Prompt], scorer: Scorer) -> None:
    asked = prompts["chain_sum:2"]
    wrong = str(int(asked.answer) + 1)
    responses = [f"#{wrong}# no, # {asked.answer} #", f"#+{asked.answer}.0#".replace("+-", "-"), f"#{wrong}#"]
    judged = scorer.score_many([(asked, response) for response in responses])
    assert [one.reward for one in judged] == [1.0, 1.0, 0.0]
    assert [one.components for one in judged] == [{"extracted": 1.0}] * 3


def test_a_response_without_an_answer_earns_nothing(prompts: dict[str, Prompt], scorer: Scorer) -> None:
    [judged] = scorer.score_many([(prompts["chain_sum:0"], prompts["chain_sum:0"].answer)])
    assert (judged.reward, judged.components) == (0.0, {"extracted": 0.0})


def test_a_task_without_a_single_right_answer_is_judged_by_its_entry(
    prompts: dict[str, Prompt], scorer: Scorer
) -> None:
    asked = prompts["graph_color:0"]
    assert asked.answer == ""
    colors = dict.fromkeys(range(200), 1)
    [judged] = scorer.score_many([(asked, f"#{colors}#".replace("'", '"'))])
    assert judged.reward is not None
    assert judged.reward < 1


def test_a_task_that_depends_on_the_order_of_sets_is_made_again_as_it_was(
    prompts: dict[str, Prompt], scorer: Scorer
) -> None:
    asked = [prompts[f"isomorphic_strings:{n}"] for n in range(4)]
    judged = scorer.score_many([(prompt, f"#{prompt.answer}#") for prompt in asked])
    assert [one.reward for one in judged] == [1.0] * 4


def test_a_template_around_the_problem_does_not_matter_but_another_problem_is_an_error(
    prompts: dict[str, Prompt], scorer: Scorer
) -> None:
    asked, other = prompts["chain_sum:0"], prompts["chain_sum:1"]
    framed, changed = replace(asked, text=f"<user>{asked.text}<model>"), replace(asked, text=other.text)
    judged = scorer.score_many([(framed, f"#{asked.answer}#"), (changed, f"#{asked.answer}#")])
    assert judged[0].reward == 1.0
    assert (judged[1].reward, judged[1].status) == (None, "error")
    assert "makes another problem of chain_sum:0 than the prompt's" in (judged[1].error or "")


def test_a_prompt_of_a_file_is_an_error(scorer: Scorer) -> None:
    [judged] = scorer.score_many([(Prompt(prompt_id="a:1", text="a", answer="1", source="a.jsonl"), "#1#")])
    assert judged.status == "error"
    assert 'the prompt is from "a.jsonl"' in (judged.error or "")


def test_its_version_names_the_packages() -> None:
    version = make_reward(ScoringConfig(reward="reasoning_gym")).version
    assert version == f"2 reasoning_gym {importlib.metadata.version('reasoning_gym')}"
