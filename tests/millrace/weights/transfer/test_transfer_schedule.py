"""Pairs never share a rank or a worker at a time, and hardly ever leave both idle."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from millrace.weights.transfer.schedule import starts

_SIZES = arrays(np.int64, st.tuples(st.integers(1, 7), st.integers(1, 7)), elements=st.integers(0, 30))


@settings(max_examples=60, deadline=None)
@given(_SIZES)
def test_a_rank_sends_to_one_worker_at_a_time_and_a_worker_hears_one_rank(nbytes: np.ndarray) -> None:
    begin = starts(nbytes)
    for ours, sizes in [*zip(begin, nbytes, strict=True), *zip(begin.T, nbytes.T, strict=True)]:
        jobs = sorted((when, when + size) for when, size in zip(ours, sizes, strict=True) if size)
        assert all(end <= later for (_, end), (later, _) in pairwise(jobs))


@settings(max_examples=60, deadline=None)
@given(_SIZES)
def test_no_job_waits_while_both_of_its_ends_are_idle(nbytes: np.ndarray) -> None:
    begin = starts(nbytes)
    end = begin + nbytes
    for rank, worker in zip(*np.nonzero(nbytes), strict=True):
        others = [(begin[rank, i], end[rank, i]) for i in range(nbytes.shape[1]) if i != worker and nbytes[rank, i]]
        others += [(begin[i, worker], end[i, worker]) for i in range(len(nbytes)) if i != rank and nbytes[i, worker]]
        for when in range(begin[rank, worker]):
            assert any(first <= when < last for first, last in others)


def test_a_square_of_equal_jobs_takes_no_longer_than_one_rank_needs() -> None:
    assert starts(np.full((16, 16), 3)).max() == 15 * 3
