"""Rewards: right answers earn 1, wrong ones 0, and failures nothing at all."""

import math
from typing import Any

import pytest

from configs.task import ScoringConfig
from millrace.errors import InputError
from millrace.rewards.base import Reward, Score, safe_score
from millrace.rewards.factory import make_reward
from millrace.types import Prompt

PROMPT = Prompt(prompt_id="p", text="12+30=", answer="42", source="test")


class Raising(Reward):
    """A verifier that fails."""

    name = "raising"
    version = "1"

    def __init__(self, raised: BaseException) -> None:
        self._raised = raised

    def score(self, prompt: Prompt, response: str) -> Score:
        raise self._raised


@pytest.mark.parametrize(
    ("response", "reward", "extracted"),
    [
        ("so #### 42", 1.0, 1.0),
        ("#### 41, no: #### 42", 1.0, 1.0),
        ("#### 42, no: #### 41", 0.0, 1.0),
        ("42", 0.0, 0.0),
        ("#### ", 0.0, 0.0),
    ],
)
def test_the_last_match_of_a_pattern_holds_the_answer(response: str, reward: float, extracted: float) -> None:
    score = make_reward(ScoringConfig(reward="exact_match", answer_pattern=r"#### (\d+)")).score(PROMPT, response)
    assert score == Score(reward=reward, components={"exact_match": reward, "extracted": extracted})


@pytest.mark.parametrize(
    ("pattern", "answer", "response", "reward"),
    [
        ("#### (-?[0-9]+)", "12", "#### 12", 1.0),
        ("#### (-?[0-9]+)", "12", "#### 12.", 1.0),
        ("#### (-?[0-9]+)", "12", "#### 12 apples", 1.0),
        ("#### (-?[0-9]+)", "12", "#### 12.5", 0.0),
        ("#### (-?[0-9]+)", "1", "#### 1,234", 0.0),
        ("#### (-?[0-9]+)", "1234", "#### 1,234", 1.0),
        ("#### (-?[0-9]+)", "1,234", "#### 1234", 1.0),
        ("#### (-?[0-9]+)", "3", "#### 3/4", 0.0),
        ("#### (-?[0-9]+)", "10", "#### 10:15", 0.0),
        ("#### (-?[0-9]+)", "-5", "#### −5", 1.0),
        ("(-?[0-9]+)", "5", "x = −5", 0.0),
        ("([0-9]+)", "5", "x = -5", 0.0),
        ("(-?[0-9]+)", "5", "It is 12.5", 0.0),
        ("(-?[0-9]+)", "234", "It is 1,234", 0.0),
        ("(-?[0-9]+)", "3", "3 of them weigh 12.5", 0.0),
        (r"\(([0-9]+),[0-9]+\)", "3", "(3,4)", 1.0),
        ("([0-9][+][0-9]=[0-9])$", "3+4=7", "1+2=3,3+4=7", 1.0),
    ],
)
def test_a_pattern_finds_whole_numbers_only(pattern: str, answer: str, response: str, reward: float) -> None:
    prompt = Prompt(prompt_id="p", text="?", answer=answer, source="test")
    exact_match = make_reward(ScoringConfig(reward="exact_match", answer_pattern=pattern))
    assert exact_match.score(prompt, response).reward == reward


@pytest.mark.parametrize(
    ("response", "reward", "extracted"),
    [
        ("42", 1.0, 1.0),
        (" 42\n", 1.0, 1.0),
        ("43", 0.0, 1.0),
        ("", 0.0, 1.0),
        ("4 2", 0.0, 1.0),
        ("042", 0.0, 1.0),
        ("41, or</think>42", 1.0, 1.0),
        ("<think>41</think>\n\n**42**", 1.0, 1.0),
        ("4</think>2", 0.0, 1.0),
        ("<think>42", 0.0, 0.0),
        ("<think>41</think>42<think>", 0.0, 0.0),
    ],
)
def test_the_answer_is_the_text_after_the_last_thought(response: str, reward: float, extracted: float) -> None:
    score = make_reward(ScoringConfig(reward="exact_match")).score(PROMPT, response)
    assert score == Score(reward=reward, components={"exact_match": reward, "extracted": extracted})


def test_any_error_becomes_short_and_storable() -> None:
    score = safe_score(Raising(ValueError("\ud800" * 10**6)), PROMPT, "42")
    assert score.error is not None
    assert len(score.error) == 500
    assert score.error.encode() == score.error.encode("ascii", "replace").replace(b"?", "…".encode())


def test_an_error_cannot_control_a_terminal() -> None:
    score = safe_score(Raising(ValueError("\x1b[2J\x07\x00\x9b\u202e")), PROMPT, "42")
    assert score.error is not None
    assert score.error.isprintable()


@pytest.mark.parametrize("raised", [KeyError("no\nverdict"), SystemExit(0), KeyboardInterrupt()])
def test_a_reward_that_raises_is_an_error_and_never_a_zero(raised: BaseException) -> None:
    score = safe_score(Raising(raised), PROMPT, "42")
    assert (score.reward, score.status) == (None, "error")


@pytest.mark.parametrize("reward", [math.nan, math.inf, 3.5e38, -1e300])
def test_a_reward_outside_the_range_of_float32_is_refused(reward: float) -> None:
    with pytest.raises(ValueError):
        Score(reward=reward)
    assert Score(reward=3.4e38).reward == 3.4e38


@pytest.mark.parametrize(
    "fields",
    [
        {"reward": 0.0, "status": "error", "error": "broken"},
        {"reward": None},
        {"reward": None, "status": "timeout"},
        {"reward": 1.0, "error": "broken"},
    ],
)
def test_a_contradictory_score_cannot_be_made(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Score(**fields)


def test_an_unknown_reward_is_refused() -> None:
    with pytest.raises(InputError):
        make_reward(ScoringConfig(reward="exact_mach"))
