"""Fixtures of the tests on GPUs: weights to load."""

from collections.abc import Iterator

import pytest
from support.engines.policies import Offer, offering


@pytest.fixture
def offer() -> Iterator[Offer]:
    with offering() as offer:
        yield offer
