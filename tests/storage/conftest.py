"""Fixtures of the storage tests: a store that needs no server, and valid tables to put into it."""

import shutil
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from support.stores.memory import unused_name
from support.streams import rows

from storage.stores.base import Store
from storage.stores.memory import MemoryStore

MakeTable = Callable[..., pa.Table]


@pytest.fixture
def memory_store() -> Iterator[MemoryStore]:
    store = MemoryStore(unused_name())
    yield store
    shutil.rmtree(store.root, ignore_errors=True)


@pytest.fixture
def store(memory_store: MemoryStore) -> Store:
    """A store for what does not depend on its kind; test_store.py holds the contract that each kind keeps."""
    return memory_store


@pytest.fixture
def make_trajectories() -> MakeTable:
    return rows.trajectories


@pytest.fixture
def make_scores() -> MakeTable:
    return rows.scores
