"""What a push by `direct` costs each process, as the kernel counts it: memory, and bytes written."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from support.stages.failpoints import Failpoints
from support.weights.direct import measured_generator, measured_rank, sync_weights
from support.weights.direct_policies import POLICIES

from millrace.weights.direct.exchange import BUCKET_BYTES

VERSIONS = 4
POLICY = POLICIES["large"]
NOISE = 24 << 20
"""Bytes that a process takes for threads, connections and what it imports late: less than a fifth of a shard."""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "generators"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.extended)])
def test_a_process_adds_its_shard_and_two_buckets_and_one_copy_of_the_model_per_generator_is_written(
    ranks: int, generators: int, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        unarmed = Failpoints(tmp_path / "fired")
        leading = stack.enter_context(sync_weights(tmp_path, generators, unarmed, deadline_seconds=30.0))
        trainer = [stack.enter_context(measured_rank(tmp_path, rank, ranks, unarmed)) for rank in range(ranks)]
        taking = [stack.enter_context(measured_generator(tmp_path, number, unarmed)) for number in range(generators)]
        for version in range(1, VERSIONS + 1):
            for rank in trainer:
                rank.offer(version)
            for rank in trainer:
                assert rank.line() == {"offered": version}
            planned = leading.read_until_all_have(version)["wire_bytes"]
            for generator in taking:
                assert generator.line() == {"version": version}
        by_rank = [rank.measured() for rank in trainer]
        by_generator = [generator.measured() for generator in taking]
    assert planned == VERSIONS * generators * POLICY.nbytes
    for found in by_rank:
        assert found["added_bytes"] <= POLICY.nbytes / ranks + 2 * BUCKET_BYTES + NOISE
    for found in by_generator:
        assert found["added_bytes"] <= POLICY.nbytes + 2 * BUCKET_BYTES + NOISE
    everybody = by_rank + by_generator
    assert sum(found["sent_bytes"] for found in everybody) == planned
    # What members tell sync_weights is written too.
    assert 0 <= sum(found["written_bytes"] for found in everybody) - planned <= planned / 1000
