"""Fixtures of the dashboard's tests: a small stored run, and readers whose clock a test moves on."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.pages.sites import HandClock
from support.stored_run.run import Shape, StoredRun, make_run
from support.stores.dict_store import DictStore

from dashboard.read.model import RunData
from dashboard.read.run_reader import RunReader
from storage.stores.base import Store

SMALL = Shape(steps=12, generators=2, scorers=2, max_staleness=2, stale_share=0.3, error_share=0.3, seed=5)

Look = Callable[[], RunData]


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def dict_store() -> DictStore:
    return DictStore()


@pytest.fixture
def stored_run(dict_store: DictStore) -> StoredRun:
    """A run in `dict_store` at version 8 of 12, evaluated at versions 0 and 8; `append` continues it."""
    run = StoredRun(dict_store, "small", SMALL)
    run.evaluate(0.25)
    run.append(8)
    run.evaluate(0.5)
    return run


@pytest.fixture(scope="session")
def mixture() -> RunData:
    """A run of twelve steps with the sources `math` and `words`, evaluated before and after them."""
    store = DictStore()
    make_run(store, "mixture", replace(SMALL, sources=("math", "words")))
    return RunReader(store).look()


@pytest.fixture
def watch() -> Callable[[Store], Look]:
    """`look = watch(store)`: a reader that looks anew whenever `look()` is called."""

    def watch(store: Store) -> Look:
        clock = HandClock()
        reader = RunReader(store, clock)

        def look() -> RunData:
            clock.now += 1.0
            return reader.look()

        return look

    return watch
