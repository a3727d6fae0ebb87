"""The stream of consumed trajectories: one row per trajectory that the trainer took."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from support.streams.scored_groups import scored_group

from millrace.rollouts.consumed import ConsumedWriter
from millrace.rollouts.ledger import Amount
from millrace.rollouts.masking import mask_too_old
from millrace.rollouts.scored_group import LostPart, ScoredGroup
from storage import layout
from storage.schema import CONSUMED, TRAINER_LOGPROBS
from storage.stores.memory import MemoryStore
from storage.streams.record import Record
from storage.streams.stream import StreamReader


def group(
    number: int,
    lengths: tuple[int, ...] = (2, 3),
    rewards: tuple[float | None, ...] = (1.0, 0.0),
    **versions: list[int],
) -> ScoredGroup:
    """Group `number`, whose first row is ten times that; the last token of each member is of the newest version."""
    oldest = versions.get("oldest", [4] * len(lengths))
    newest = versions.get("newest", oldest)
    members = [[old] * (length - 1) + [new] for length, old, new in zip(lengths, oldest, newest, strict=True)]
    return scored_group(number, members, rewards)


def values(*lengths: int) -> tuple[list[npt.NDArray[np.float32]], list[npt.NDArray[np.float32]]]:
    """log π and entropies of responses."""
    entropies = [np.arange(length, dtype=np.float32) for length in lengths]
    return [entropies_R - 8 for entropies_R in entropies], entropies


@pytest.fixture
def writer(memory_store: MemoryStore) -> ConsumedWriter:
    return ConsumedWriter(memory_store, incarnation=3)


def stored(store: MemoryStore, path: str, schema: pa.Schema) -> list[dict]:
    reader, rows = StreamReader(store, path, schema), []
    while (part := reader.next()) is not None:
        rows += part.table.to_pylist()
    return rows


def test_a_trained_row_has_versions_reward_and_advantage(memory_store: MemoryStore, writer: ConsumedWriter) -> None:
    writer.step(8, [group(5, oldest=[4, 6], newest=[6, 7])], [0.5, -0.5], *values(2, 3))
    writer.flush()
    first, second = stored(memory_store, layout.CONSUMED, CONSUMED)
    assert {name: first[name] for name in first if name != "t"} == {
        "incarnation": 3,
        "policy_version": 8,
        "generator": 1,
        "trajectory_row_id": 50,
        "group_id": 5,
        "source": "default",
        "prompt_id": "prompt-5",
        "sample_index": 0,
        "outcome": "trained",
        # Taken by version 7, and the oldest weights of the group are 4: three of these versions while it was sampled.
        "staleness": 3,
        "staleness_in_flight": 3,
        "min_policy_version": 4,
        "max_policy_version": 6,
        "tokens": 2,
        "reward": 1.0,
        "advantage": 0.5,
        "masked_tokens": 0,
    }
    assert (second["trajectory_row_id"], second["advantage"], second["min_policy_version"]) == (51, -0.5, 6)


def test_log_probabilities_and_entropies_are_stored_per_trajectory(
    memory_store: MemoryStore, writer: ConsumedWriter
) -> None:
    writer.step(8, [group(5), group(6)], [0.5, -0.5, 0.5, -0.5], *values(2, 3, 2, 3))
    writer.close()
    rows = stored(memory_store, layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS)
    assert [(row["generator"], row["trajectory_row_id"]) for row in rows] == [(1, 50), (1, 51), (0, 60), (0, 61)]
    assert rows[1]["trainer_logprobs"] == [-8.0, -7.0, -6.0]
    assert rows[1]["trainer_entropies"] == [0.0, 1.0, 2.0]


def test_a_member_whose_verifier_failed_is_an_error(memory_store: MemoryStore, writer: ConsumedWriter) -> None:
    writer.step(1, [group(5, (2, 3, 4), (1.0, None, 0.0), oldest=[0, 0, 0])], [0.5, -0.5], *values(2, 4))
    writer.close()
    rows = stored(memory_store, layout.CONSUMED, CONSUMED)
    assert [(row["outcome"], row["reward"], row["advantage"]) for row in rows] == [
        ("trained", 1.0, 0.5),
        ("error", None, None),
        ("trained", 0.0, -0.5),
    ]
    assert len(stored(memory_store, layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS)) == 2


def test_a_masked_group_has_its_masked_tokens_and_remaining_staleness(
    memory_store: MemoryStore, writer: ConsumedWriter
) -> None:
    group = scored_group(5, [[1, 1, 6], [1, 1], [6], [1, 5]], [1.0, 0.5, 0.0, None])
    writer.step(8, [mask_too_old(group, 7, 4)], [0.5, -0.5], *values(3, 1))
    writer.close()
    rows = stored(memory_store, layout.CONSUMED, CONSUMED)
    assert [(row["outcome"], row["masked_tokens"], row["advantage"], row["reward"]) for row in rows] == [
        ("trained", 2, 0.5, 1.0),
        ("stale", 2, None, 0.5),
        ("trained", 0, -0.5, 0.0),
        # A replay with another reward may train it, and has to mask the same token.
        ("error", 1, None, None),
    ]
    assert {(row["staleness"], row["staleness_in_flight"]) for row in rows} == {(2, 5)}
    logprob_rows = stored(memory_store, layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS)
    assert [row["trajectory_row_id"] for row in logprob_rows] == [50, 52]


def test_staleness_is_counted_from_the_version_that_took_the_group(
    memory_store: MemoryStore, writer: ConsumedWriter
) -> None:
    writer.step(8, [group(5), group(6)], [0.5, -0.5] * 2, *values(2, 3, 2, 3), trainer_versions=[5, 4])
    writer.close()
    rows = stored(memory_store, layout.CONSUMED, CONSUMED)
    assert [row["staleness"] for row in rows] == [1, 1, 0, 0]


def test_a_dropped_group_is_written_with_the_next_step(memory_store: MemoryStore, writer: ConsumedWriter) -> None:
    writer.drop(group(4, oldest=[1, 1]), "stale", 7)
    writer.flush()
    assert stored(memory_store, layout.CONSUMED, CONSUMED) == []
    writer.step(8, [group(5)], [0.5, -0.5], *values(2, 3))
    writer.close()
    rows = stored(memory_store, layout.CONSUMED, CONSUMED)
    assert [(row["group_id"], row["outcome"], row["staleness"]) for row in rows] == [
        (4, "stale", 6),
        (4, "stale", 6),
        (5, "trained", 3),
        (5, "trained", 3),
    ]


def test_a_damaged_part_is_written_with_its_remaining_rows_and_tokens(
    memory_store: MemoryStore, writer: ConsumedWriter
) -> None:
    record = Record(
        seq=3, kind="data", epoch=0, nonce="", writer="", prev="", rows=8, first_row_id=40, tokens=30,
        min_policy_version=2, max_policy_version=3,
    )  # fmt: skip
    lost = LostPart(generator=1, record=record, left=Amount(rollouts=6, tokens=20), num_groups=1, reason="damaged")
    writer.drop(lost, "corrupt", 4)
    writer.step(5, [group(5)], [0.5, -0.5], *values(2, 3))
    writer.close()
    rows = [row for row in stored(memory_store, layout.CONSUMED, CONSUMED) if row["outcome"] == "corrupt"]
    assert [row["trajectory_row_id"] for row in rows] == list(range(42, 48))
    assert sum(row["tokens"] for row in rows) == 20
    assert {row["prompt_id"] for row in rows} == {""}


def test_a_record_has_the_versions_and_sums_of_its_rows(memory_store: MemoryStore, writer: ConsumedWriter) -> None:
    for version in (5, 6):
        writer.step(version, [group(5)], [0.5, -0.5], *values(2, 3))
    writer.close()
    record = StreamReader(memory_store, layout.CONSUMED, CONSUMED).next_record()
    assert record is not None
    assert (record.min_policy_version, record.max_policy_version, record.incarnation) == (5, 6, 3)
    assert (record.rows, record.tokens) == (4, 10)
