"""The verdict of a run on disk, as a person reads it who opens its page: each of eight kinds gets its own cause."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import expect
from support.pages.dashboard_page import Watched
from support.pages.spoiled import flip_a_bit
from support.stored_run.metrics import TIMES, Manner
from support.stored_run.run import Shape, StoredRun

from storage import layout
from storage.stores.local import LocalStore

pytestmark = pytest.mark.browser

FINE = ("good", "good", "good", "good", "good")


def manner(*, train: float, generate: float, collapses_at: int | None = None) -> Manner:
    """The trainer and the generators wait for these shares of their time."""
    times = {
        "train": {"train": 1 - train, "waiting for scored groups": train},
        "generate": {"generate": 1 - generate, "waiting for room under max_staleness": generate},
    }
    return Manner(times={**TIMES, **times}, collapses_at=collapses_at)


HEALTHY = manner(train=0.04, generate=0.15)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A run of 60 steps, of which it has made 40, and what its page says."""

    manner: Manner = HEALTHY
    stale_share: float = 0.0
    afterwards: Callable[[StoredRun, LocalStore], None] = lambda run, store: None
    """What happens to it then."""
    levels: tuple[str, ...] = FINE
    """Of the clauses: state, health, bottleneck, staleness, effective sample size."""
    words: tuple[str, ...]
    """In clauses, one of each."""
    advice: str


KINDS = {
    "healthy": Kind(
        words=(
            "running: version 40 of 60, 1 s a step, 20 s left",
            "healthy: no alarm",
            "trainer-bound: train 96% busy",
        ),
        advice="Nothing needs to be changed.",
    ),
    "trainer-bound": Kind(
        manner=manner(train=0.01, generate=0.5),
        words=("trainer-bound: train 99% busy, generate idle 50%",),
        advice="Generators wait 50% of their time: fewer would do, or give the trainer one's device.",
    ),
    "generator-bound": Kind(
        manner=manner(train=0.6, generate=0.02),
        levels=("good", "good", "warning", "good", "good"),
        words=("generator-bound: generate 98% busy, train idle 60%",),
        advice="Raise generation.replicas or give generators more devices: the trainer waits for them.",
    ),
    "too-stale": Kind(
        stale_share=0.7,
        levels=("good", "good", "good", "bad", "good"),
        words=("of the rollouts were too old and dropped",),
        advice="Set staleness.too_old to mask, so that only the tokens that are too old are lost.",
    ),
    "collapsed": Kind(
        manner=manner(train=0.04, generate=0.15, collapses_at=25),
        levels=("good", "bad", "good", "good", "good"),
        words=("collapsed: version", "and was 0."),
        advice="Set training.on_collapse to roll_back, which also lowers the learning rate, and resume.",
    ),
    "hanging": Kind(
        afterwards=lambda run, store: run.write_status("train", silent={"train-0": 300.0}),
        levels=("bad", "good", "good", "good", "good"),
        words=("hanging at version 40 of 60: train-0 has written nothing for 5 min, last: train",),
        advice="Read logs/train-0.log in the run's folder: a stage that hangs writes its stacks there",
    ),
    "finished": Kind(
        afterwards=lambda run, store: run.finish(),
        words=("finished at version 40 of 60", "trainer-bound: train 96% busy"),
        advice="Take its best version: `millrace export",
    ),
    "damaged": Kind(
        afterwards=lambda run, store: flip_a_bit(store, layout.CONSUMED),
        levels=("good", "bad", "good", "good", "good"),
        words=("damaged: streams/consumed",),
        advice="Run `millrace fsck",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "too-stale" else pytest.mark.extended) for name in KINDS]
)
def test_the_strip_of_a_recorded_run_names_its_cause_and_no_other(root: Path, watched: Watched, name: str) -> None:
    kind, store = KINDS[name], LocalStore(root / name, fsync=False)
    shape = Shape(steps=60, seed=3, stale_share=kind.stale_share, steps_per_part=5)
    run = StoredRun(store, name, shape, kind.manner)
    run.append(40)
    kind.afterwards(run, store)
    watched.open(f"/run/{name}")
    strip = watched.page.get_by_role("region", name="verdict")
    for words in kind.words:
        expect(strip).to_contain_text(words)
    assert [clause.get_attribute("class") for clause in strip.locator(".clauses a").all()] == [*kind.levels]
    expect(strip.locator(".advice")).to_contain_text(kind.advice)
    watched.assert_quiet()
