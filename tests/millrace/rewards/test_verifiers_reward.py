"""The reward of a single-turn `verifiers` environment: its own rubric, whose failures are errors."""

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.rewards.one_source import score_pairs, scorer_of

from configs.task import PromptsConfig, ScoringConfig
from millrace.prompts.packages import listed_prompts, prompt_sources
from millrace.rewards.factory import make_reward
from millrace.rewards.scorer import Scorer
from millrace.types import Prompt

pytestmark = pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed")

SOURCE = "verifiers:tests.support.rewards.sums_environment"


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return listed_prompts(prompt_sources(SOURCE, PromptsConfig()))


@pytest.fixture(scope="module")
def scorer(prompts: list[Prompt]) -> Iterator[Scorer]:
    with scorer_of(make_reward(ScoringConfig(reward="verifiers"), [prompts[0].source])) as scorer:
        yield scorer


def test_its_rubric_gives_the_reward_and_a_component_a_function(prompts: list[Prompt], scorer: Scorer) -> None:
    [right, wrong] = score_pairs(scorer, [(prompts[1], "2"), (prompts[1], "it is 2, I think")])
    assert (right.reward, wrong.reward) == (1.25, 0.0)
    assert right.components.items() >= {"right": 1.0, "short": 1.0, "fails_at_boom": 0.0}.items()
    assert wrong.components.items() >= {"right": 0.0, "short": 0.0}.items()


def test_a_function_that_fails_is_an_error_and_never_a_zero(prompts: list[Prompt], scorer: Scorer) -> None:
    [failed, fine] = score_pairs(scorer, [(prompts[3], "boom"), (prompts[3], "4")])
    assert (failed.reward, failed.status) == (None, "error")
    assert "fails_at_boom: no verdict on 3" in (failed.error or "")
    assert fine.reward == 1.25


def test_a_row_that_has_changed_is_an_error(prompts: list[Prompt], scorer: Scorer) -> None:
    framed, changed = replace(prompts[0], text=f"<{prompts[0].text}>"), replace(prompts[0], text=prompts[1].text)
    [fine, failed] = score_pairs(scorer, [(framed, "1"), (changed, "1")])
    assert fine.reward == 1.25
    assert failed.status == "error"
    assert "is another one than the prompt's" in (failed.error or "")


def test_its_version_names_the_package() -> None:
    assert (
        make_reward(ScoringConfig(reward="verifiers")).version
        == f"1 verifiers {importlib.metadata.version('verifiers')}"
    )
