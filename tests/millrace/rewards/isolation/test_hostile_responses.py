"""Hostile responses: none is executed, accepted, holds up the others, or outlives its deadline."""

from pathlib import Path

import pytest
from support.rewards.hostile import ORDERS, RESPONSES, orders, responses
from support.rewards.one_source import score_pairs, scorer_of

from configs.task import ScoringConfig
from millrace.rewards.base import Reward, Score
from millrace.rewards.factory import make_reward
from millrace.rewards.isolation.sandbox import Limits
from millrace.types import Prompt

LIMITS = Limits(workers=2, timeout_seconds=1.0, memory_mb=256)
GENEROUS = 2 * LIMITS.timeout_seconds + 10.0
"""Seconds that no response may take on a busy machine."""
BAD_PATTERN = r"^(([a-z])+)+$"
SUM = {"reward": "weighted_sum", "weights": {"math": 1.0, "exact_match": 1.0}, "answer_pattern": BAD_PATTERN}


def prompt(answer: str) -> Prompt:
    return Prompt(prompt_id="p", text="?", answer=answer, source="test")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "answer"),
    [
        (make_reward(ScoringConfig(reward="exact_match")), "42"),
        (make_reward(ScoringConfig(reward="exact_match", answer_pattern=BAD_PATTERN)), "42"),
        (make_reward(ScoringConfig(reward="math")), "42"),
        (make_reward(ScoringConfig(reward="math")), r"\frac{1}{2}"),
        (make_reward(ScoringConfig.model_validate(SUM)), "42"),
    ],
    ids=["exact_match", "a bad pattern", "math", "math about a half", "a sum"],
)
def test_no_response_is_executed_or_accepted(reward: Reward, answer: str, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    hostile = responses(witness)
    good = [(prompt(str(number)), str(number)) for number in range(3)]
    with scorer_of(reward, LIMITS) as scorer:
        scores = score_pairs(scorer, [*[(prompt(answer), text) for text in hostile.values()], *good])
    assert {name: score for name, score in zip(hostile, scores, strict=False) if score.reward} == {}
    assert max(score.seconds for score in scores) < GENEROUS
    assert {score.status for score in scores[len(RESPONSES) :]} == {"ok"}
    assert not witness.exists()


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Score]:
    """The score of each order under a function that executes it; no order makes the witness."""
    witness = tmp_path_factory.mktemp("executed") / "witness"
    texts = orders(witness)
    config = ScoringConfig(reward="tests.support.rewards.own_rewards:execute")
    with scorer_of(make_reward(config), LIMITS) as scorer:
        scores = score_pairs(scorer, [(prompt("42"), text) for text in texts.values()])
    assert not witness.exists()
    return dict(zip(texts, scores, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        # The function ignores the exit code of os.system.
        ("runs a program", "ok", ""),
        ("starts a program", "error", "Operation not permitted"),
        ("becomes a program", "error", "Operation not permitted"),
        ("writes a file", "error", "Operation not permitted"),
        ("adds to a file", "error", "Operation not permitted"),
        ("makes a folder", "error", "Operation not permitted"),
        ("makes a link", "error", "Operation not permitted"),
        ("makes a socket with a name", "error", "Operation not permitted"),
        ("calls home", "error", "Operation not permitted"),
        ("sends a packet", "error", "Operation not permitted"),
        ("is a fork bomb", "error", "Operation not permitted"),
        ("is a thread bomb", "error", "can't start new thread"),
        ("is a bomb of small threads", "error", "more than 64 threads"),
        ("takes all memory", "error", "more than 256 MiB of memory"),
        ("takes all memory at once", "error", "MemoryError"),
        ("never ends", "timeout", "no verdict after 1 s"),
        ("sleeps", "timeout", "no verdict after 1 s"),
        ("prints for ever", "timeout", "no verdict after 1 s"),
        ("exits", "error", "SystemExit"),
        ("exits at once", "error", "ended (exit code 0)"),
        ("crashes", "error", "ended (signal 11)"),
        ("interrupts", "error", "KeyboardInterrupt"),
        ("catches signals and exceptions", "timeout", "no verdict after 1 s"),
        ("kills its parent", "error", "Operation not permitted"),
        ("kills its group", "error", "Operation not permitted"),
        ("leaves its group", "error", "Operation not permitted"),
        ("lifts its limits", "error", "not allowed to raise"),
        ("traces its parent", "ok", ""),
        ("floods its descriptors", "error", "the process that scored it ended"),
        ("writes nonsense to its descriptors", "error", "the verdict can't be read"),
    ],
)
def test_a_response_that_is_executed_is_contained(
    executed: dict[str, Score], name: str, status: str, reason: str
) -> None:
    score = executed[name]
    assert (score.status, not score.reward) == (status, True), score.error
    assert reason in (score.error or "")
    assert score.seconds < GENEROUS


def test_every_order_is_in_the_list_above(executed: dict[str, Score]) -> None:
    assert list(executed) == list(ORDERS)
