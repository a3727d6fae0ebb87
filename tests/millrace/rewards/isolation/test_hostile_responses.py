"""Hostile responses: none is executed, none accepted, none holds up the others, and none outlives its deadline."""

from pathlib import Path

import psutil
import pytest
from support.rewards.hostile import ORDERS, RESPONSES, orders, responses

from configs.scoring import ScoringConfig
from millrace.rewards.base import Reward
from millrace.rewards.factory import make_reward
from millrace.rewards.isolation.sandbox import Limits
from millrace.rewards.scorer import Scorer
from millrace.types import Prompt

LIMITS = Limits(workers=2, timeout_seconds=1.0, memory_mb=256)
GENEROUS = 2 * LIMITS.timeout_seconds + 10.0
"""Seconds that nothing may take on a busy machine."""
BAD_PATTERN = r"^(([a-z])+)+$"


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
        (
            make_reward(
                ScoringConfig(
                    reward="weighted_sum", weights={"math": 1.0, "exact_match": 1.0}, answer_pattern=BAD_PATTERN
                )
            ),
            "42",
        ),
    ],
    ids=["exact_match", "a bad pattern", "math", "math about a half", "a sum"],
)
def test_no_response_is_executed_or_accepted(reward: Reward, answer: str, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    hostile = responses(witness)
    good = [(prompt(str(number)), str(number)) for number in range(3)]
    with Scorer(reward, LIMITS) as scorer:
        judged = scorer.score_many([*[(prompt(answer), text) for text in hostile.values()], *good])
    by_name = dict(zip(hostile, judged, strict=False))
    assert {name: score for name, score in by_name.items() if score.reward} == {}
    assert {name: one.seconds for name, one in by_name.items() if one.seconds > GENEROUS} == {}
    assert {one.status for one in judged[len(RESPONSES) :]} == {"ok"}
    assert not witness.exists()


@pytest.fixture(scope="module")
def obeyed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float | None, str, str | None, float]]:
    """What came of each order: its reward, its status, its error, and its seconds; the witness is nobody's."""
    witness = tmp_path_factory.mktemp("obeyed") / "witness"
    given = orders(witness)
    with Scorer(make_reward(ScoringConfig(reward="tests.support.rewards.own_rewards:obedient")), LIMITS) as scorer:
        judged = scorer.score_many([(prompt("42"), text) for text in given.values()])
    assert not witness.exists()
    return {name: (one.reward, one.status, one.error, one.seconds) for name, one in zip(given, judged, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        # os.system says by its exit code that it could not, which the function does not look at.
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
        ("goes on for ever", "timeout", "no verdict after 1 s"),
        ("sleeps", "timeout", "no verdict after 1 s"),
        ("prints for ever", "timeout", "no verdict after 1 s"),
        ("exits", "error", "SystemExit"),
        ("exits at once", "error", "ended (exit code 0)"),
        ("crashes", "error", "ended (signal 11)"),
        ("interrupts", "error", "KeyboardInterrupt"),
        ("catches what would stop it", "timeout", "no verdict after 1 s"),
        ("kills the one before it", "error", "Operation not permitted"),
        ("kills its group", "error", "Operation not permitted"),
        ("leaves its group", "error", "Operation not permitted"),
        ("lifts its limits", "error", "not allowed to raise"),
        ("traces its parent", "ok", ""),
        ("floods whoever listens", "error", "the process that scored it ended"),
        ("talks nonsense to whoever listens", "error", "the verdict can't be read"),
    ],
)
def test_a_function_that_obeys_its_responses_is_contained(
    obeyed: dict[str, tuple[float | None, str, str | None, float]], name: str, status: str, reason: str
) -> None:
    reward, found, error, seconds = obeyed[name]
    assert (found, not reward) == (status, True), error
    assert reason in (error or "")
    assert seconds < GENEROUS


def test_every_order_is_in_the_list_above(obeyed: dict[str, object]) -> None:
    assert list(obeyed) == list(ORDERS)


@pytest.mark.slow
def test_nothing_is_left_of_those_that_would_not_end() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    given = orders(Path("/nowhere/witness"))
    with Scorer(make_reward(ScoringConfig(reward="tests.support.rewards.own_rewards:obedient")), LIMITS) as scorer:
        scorer.score_many([(prompt("42"), given[name]) for name in ("is a fork bomb", "catches what would stop it")])
        during = psutil.Process().children(recursive=True)
    left = [child for child in during if child.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=10)
    assert alive == []
