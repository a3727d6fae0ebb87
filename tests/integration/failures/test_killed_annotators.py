"""Campaigns with a judge and a teacher whose annotators are killed at each of their failpoints."""

import itertools
import os
from pathlib import Path

import pytest
from support.campaigns.campaigns import Millrace, assert_balanced, final_weights
from support.campaigns.kill_matrix import OF_ANNOTATORS, campaigns
from support.rewards.stub_service import StubService, graded, stub_service
from support.streams.rows import read_rows

from storage import layout
from storage.schema import SCORE, TEACHER

pytestmark = pytest.mark.campaign

SEED = int(os.environ.get("MILLRACE_FAULT_SEED", "0"))
STEPS = 6
CAMPAIGNS = 3
"""Two kills of each annotator in each: all failpoints."""


def settings(service: StubService) -> dict[str, object]:
    return {
        "pipeline.mode": "sync",
        "scoring.reward": "judge",
        "scoring.endpoint.url": service.url,
        "scoring.judge.model": "large",
        "teachers": {"start": {"path": "start"}},
        "training.distillation.teacher": "start",
        "evaluation.every": None,
        "training.max_steps": STEPS,
    }


def grade(response: str, expected: str) -> float:
    """Most responses get some of it."""
    return 10.0 if response == expected else float(len(response))


@pytest.fixture(scope="module")
def calm_weights(module_millrace: Millrace) -> bytes:
    """The final weights of the campaign that nothing disturbs."""
    with stub_service(graded(grade)) as service:
        module_millrace.finish("calm", **settings(service))
    return final_weights(module_millrace.store("calm"), STEPS)


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.extended) for n in range(1, CAMPAIGNS))])
def test_killed_anywhere_annotators_lose_and_repeat_nothing(
    number: int, millrace: Millrace, tmp_path: Path, calm_weights: bytes
) -> None:
    specs = next(itertools.islice(campaigns(SEED, OF_ANNOTATORS), number, None))
    print(f"seed {SEED}, campaign {number}: {'; '.join(specs)}")
    with stub_service(graded(grade)) as service:
        armed = millrace.arm(tmp_path / "fired", *specs)
        summary = millrace.finish("wounded", **settings(service))
    assert armed.missed() == []
    assert_balanced(summary)
    store = millrace.store("wounded")
    assert final_weights(store, STEPS) == calm_weights
    for pool, schema in (("scores/judge", SCORE), ("teachers/start", TEACHER)):
        rows = read_rows(store, layout.annotations(pool, 0, 0, 1), schema)
        assert [row["row_id"] for row in rows] == [*range(len(rows))]
        assert {row["status"] for row in rows} == {"ok"}
    millrace.run("fsck", store.url).expect_success()
    # The judge is gone.
    millrace.run("replay", store.url, "--root", str(millrace.root), "--verify").expect_success()


def test_the_campaigns_kill_annotators_at_every_failpoint() -> None:
    specs = [spec for specs in itertools.islice(campaigns(SEED, OF_ANNOTATORS), CAMPAIGNS) for spec in specs]
    killed = {tuple(spec.split()[:2]) for spec in specs}
    assert killed == {(process, place) for process, places in OF_ANNOTATORS.items() for place in places}
