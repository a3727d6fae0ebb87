"""Why a candidate is as fast as it is, in words."""

from dataclasses import replace

import pytest
from millrace.planning.search.verdicts import bottleneck, compared
from millrace.planning.simulation.outcome import Outcome

OUTCOME = Outcome(
    steps=10,
    step_seconds=2.0,
    tokens_per_second=100.0,
    staleness_mean=1.0,
    staleness_max=2,
    dropped_share=0.0,
    masked_token_share=0.0,
    length_ratio=1.0,
    idle={"generate": 0.44, "score": 0.9, "train": 0.01},
    places_taken=0.5,
    queued_groups=1.0,
)


@pytest.mark.parametrize(
    ("idle", "said"),
    [
        ({"train": 0.01, "generate": 0.44}, "trainer-bound: train 99% busy, generate idle 44%"),
        ({"train": 0.3, "generate": 0.02}, "generator-bound: generate 98% busy, train idle 30%"),
        (
            {"train": 0.3, "generate": 0.2, "score": 0.0},
            "scorer-bound: score 100% busy, train idle 30%, generate idle 20%",
        ),
    ],
)
def test_the_stage_that_is_always_busy_is_the_bottleneck(idle: dict[str, float], said: str) -> None:
    assert bottleneck(replace(OUTCOME, idle=idle), sync=False) == said


def test_where_none_is_always_busy_the_words_say_what_they_wait_for() -> None:
    waiting = replace(OUTCOME, idle={"train": 0.5, "generate": 0.4})
    assert bottleneck(waiting, sync=True).startswith("stages wait for each other: train idle 50%, generate idle 40%")
    assert bottleneck(waiting, sync=False, push=1.5).startswith("bound by weight sync: a version takes 1.5 s")
    assert "generators wait for the staleness bound" in bottleneck(waiting, sync=False, push=0.1)


@pytest.mark.parametrize(("seconds", "said"), [(10.1, "as fast"), (15.0, "1.50 × slower"), (5.0, "2.00 × faster")])
def test_steps_are_compared_with_the_winner_s(seconds: float, said: str) -> None:
    assert compared(seconds, 10.0) == said
