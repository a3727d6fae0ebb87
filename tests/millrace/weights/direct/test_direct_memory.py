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


def measured(
    folder: Path, ranks: int, generators: int, transport: str = "direct"
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the costs of each rank and each generator after all versions; a live push measures its ranks alone."""
    with ExitStack() as stack:
        unarmed = Failpoints(folder / "fired")
        leading = stack.enter_context(sync_weights(folder, generators, unarmed, transport=transport))
        trainer = [
            stack.enter_context(trainer_rank(folder, rank, (ranks, 1), unarmed, policy="large", transport=transport))
            for rank in range(ranks)
        ]
        taking = [
            stack.enter_context(generator(folder, number, unarmed, transport=transport)) for number in range(generators)
        ]
        for version in range(1, VERSIONS + 1):
            for rank in trainer:
                rank.command(f"offer {version}")
            for rank in trainer:
                assert rank.line() == {"offered": version}
            leading.read_until_all_have(version)
            for child in taking:
                assert child.line()["version"] == version
        return [measure(rank) for rank in trainer], [measure(child) for child in taking if transport == "direct"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "generators"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.extended)])
def test_a_process_adds_its_shard_and_one_copy_of_the_model_per_generator_is_written(
    ranks: int, generators: int, tmp_path: Path
) -> None:
    by_rank, by_generator = measured(tmp_path, ranks, generators)
    for each in by_rank:
        assert each["added_bytes"] <= POLICY.nbytes / ranks + NOISE
    for each in by_generator:
        assert each["added_bytes"] <= POLICY.nbytes + NOISE
    everybody = by_rank + by_generator
    sent = VERSIONS * generators * POLICY.nbytes
    assert sum(each["sent_bytes"] for each in everybody) == sent
    # Messages to sync_weights are written too.
    assert 0 <= sum(each["written_bytes"] for each in everybody) - sent <= sent / 1000


@pytest.mark.vllm
@pytest.mark.extended
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_of_a_live_push_adds_its_shard_and_rank_0_some_whole_tensors(ranks: int, tmp_path: Path) -> None:
    by_rank, _ = measured(tmp_path, ranks, 2, "gloo")
    print(*(f"{each['added_bytes'] / POLICY.nbytes:.2f}" for each in by_rank), "of the model")
    # Rank 0 gathers one tensor after the other, never a whole model.
    assert by_rank[0]["added_bytes"] <= POLICY.nbytes * (1 / ranks + 1 / 2)
    for each in by_rank[1:]:
        assert each["added_bytes"] <= POLICY.nbytes / ranks + NOISE
    # Rank 0 broadcasts the model once, for both generators; the others send it their shards.
    assert by_rank[0]["sent_bytes"] == VERSIONS * POLICY.nbytes
    assert sum(each["sent_bytes"] for each in by_rank[1:]) == VERSIONS * POLICY.nbytes * (ranks - 1) / ranks
