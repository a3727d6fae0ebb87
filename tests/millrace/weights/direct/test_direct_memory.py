"""Costs of a push by `direct` per process, as the kernel counts them: memory, and bytes written."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.stages.failpoints import Failpoints
from support.weights.direct import Child, generator, sync_weights, trainer_rank
from support.weights.direct_policies import POLICIES

VERSIONS = 4
POLICY = POLICIES["large"]
NOISE = 24 << 20
"""Bytes that a process takes for threads, connections and late imports: less than a fifth of a shard."""


def measure(member: Child) -> dict[str, Any]:
    member.command("measure")
    return member.line()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "generators"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.extended)])
def test_a_process_adds_its_shard_and_one_copy_of_the_model_per_generator_is_written(
    ranks: int, generators: int, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        unarmed = Failpoints(tmp_path / "fired")
        leading = stack.enter_context(sync_weights(tmp_path, generators, unarmed))
        trainer = [
            stack.enter_context(trainer_rank(tmp_path, rank, (ranks, 1), unarmed, policy="large"))
            for rank in range(ranks)
        ]
        taking = [stack.enter_context(generator(tmp_path, number, unarmed)) for number in range(generators)]
        for version in range(1, VERSIONS + 1):
            for rank in trainer:
                rank.command(f"offer {version}")
            for rank in trainer:
                assert rank.line() == {"offered": version}
            leading.read_until_all_have(version)
            for child in taking:
                assert child.line()["version"] == version
        by_rank, by_generator = [measure(rank) for rank in trainer], [measure(child) for child in taking]
    for measured in by_rank:
        assert measured["added_bytes"] <= POLICY.nbytes / ranks + NOISE
    for measured in by_generator:
        assert measured["added_bytes"] <= POLICY.nbytes + NOISE
    everybody = by_rank + by_generator
    sent = VERSIONS * generators * POLICY.nbytes
    assert sum(measured["sent_bytes"] for measured in everybody) == sent
    # Messages to sync_weights are written too.
    assert 0 <= sum(measured["written_bytes"] for measured in everybody) - sent <= sent / 1000
