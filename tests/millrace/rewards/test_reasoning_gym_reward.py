"""The reward of a `reasoning_gym` task: its own verifier, on the entry that the prompt was made from."""

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.rewards.one_source import score_pairs, scorer_of

from configs.task import PromptsConfig, ReasoningGymConfig, ScoringConfig
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
    with scorer_of(make_reward(ScoringConfig(reward="reasoning_gym", answer_pattern="#([^#]*)#"), sources)) as scorer:
        yield scorer


@pytest.mark.slow
def test_the_task_decides_which_answers_are_right(prompts: dict[str, Prompt], scorer: Scorer) -> None:
    prompt = prompts["chain_sum:2"]
    wrong = str(int(prompt.answer) + 1)
    responses = [f"#{wrong}# no, # {prompt.answer} #", f"#+{prompt.answer}.0#".replace("+-", "-"), f"#{wrong}#", "1"]
    scores = score_pairs(scorer, [(prompt, response) for response in responses])
    assert [score.reward for score in scores] == [1.0, 1.0, 0.0, 0.0]
    assert [score.components["extracted"] for score in scores] == [1.0, 1.0, 1.0, 0.0]


def test_a_task_with_many_right_answers_is_scored_by_its_entry(prompts: dict[str, Prompt], scorer: Scorer) -> None:
    prompt = prompts["graph_color:0"]
    assert prompt.answer == ""
    colors = dict.fromkeys(range(200), 1)
    [score] = score_pairs(scorer, [(prompt, f"#{colors}#".replace("'", '"'))])
    assert score.reward is not None
    assert score.reward < 1


def test_an_entry_that_depends_on_the_order_of_sets_is_made_again(prompts: dict[str, Prompt], scorer: Scorer) -> None:
    rows = [prompts[f"isomorphic_strings:{n}"] for n in range(4)]
    scores = score_pairs(scorer, [(prompt, f"#{prompt.answer}#") for prompt in rows])
    assert [score.reward for score in scores] == [1.0] * 4


def test_a_template_may_surround_the_problem_but_another_problem_is_an_error(
    prompts: dict[str, Prompt], scorer: Scorer
) -> None:
    prompt, other = prompts["chain_sum:0"], prompts["chain_sum:1"]
    framed, changed = replace(prompt, text=f"<user>{prompt.text}<model>"), replace(prompt, text=other.text)
    file_prompt = Prompt(prompt_id="a:1", text="a", answer="1", source="a.jsonl")
    scores = score_pairs(scorer, [(row, f"#{prompt.answer}#") for row in (framed, changed, file_prompt)])
    assert scores[0].reward == 1.0
    assert "makes another problem of chain_sum:0 than the prompt's" in (scores[1].error or "")
    assert 'the prompt is from "a.jsonl"' in (scores[2].error or "")


def test_its_version_names_the_package() -> None:
    version = make_reward(ScoringConfig(reward="reasoning_gym")).version
    assert version == f"2 reasoning_gym {importlib.metadata.version('reasoning_gym')}"
