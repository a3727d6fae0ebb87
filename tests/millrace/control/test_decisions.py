"""Decisions in the store, and the way back from a collapse."""

import pytest
from support.evaluation.evaluated import evaluate

from millrace.control.collapse import Collapse
from millrace.control.rollback import roll_back
from millrace.errors import TrainingDiverged
from millrace.evaluation.results import read_result
from millrace.runs.decisions import (
    ROLL_BACK,
    Decisions,
    StoredDecision,
    parse_decision,
    rate_factor,
    read_decisions,
    rolled_back,
    summarize_decisions,
)
from storage import layout
from storage.checkpoints import CheckpointWriter
from storage.errors import Fenced, StreamCorrupt
from storage.progress import FolderReader
from storage.stores.memory import MemoryStore

BOUND = 2
RATE = 1e-4


def collapse(*, good_rate: float | None = RATE, bad_rate: float = RATE) -> Collapse:
    return Collapse(
        sentence="version 27: the mean reward is gone", good_version=24, good_rate=good_rate, bad_rate=bad_rate
    )


def decision(version: int, action: str = "raise", incarnation: int = 0, **measured: float) -> StoredDecision:
    return StoredDecision(
        t=1.0,
        incarnation=incarnation,
        policy_version=version,
        action=action,
        max_staleness=3,
        reason="the trainer waits 20% of its time",
        measured=measured,
    )


def test_what_was_decided_is_read_in_its_order(memory_store: MemoryStore) -> None:
    decisions = Decisions(memory_store)
    decisions.add(decision(5))
    decisions.add(decision(9, "lower"))
    assert read_decisions(memory_store) == [decision(5), decision(9, "lower")]


def test_a_trainer_that_another_one_has_replaced_decides_nothing(memory_store: MemoryStore) -> None:
    old, new = Decisions(memory_store), Decisions(memory_store)
    new.add(decision(5, incarnation=1))
    with pytest.raises(Fenced):
        old.add(decision(6))
    assert read_decisions(memory_store) == [decision(5, incarnation=1)]


@pytest.mark.parametrize("content", [b"", b"{}", b'{"t": 1}', b"\xff", b"[1]"])
def test_a_damaged_decision_is_named(memory_store: MemoryStore, content: bytes) -> None:
    memory_store.put_if_absent(layout.decision(0), content)
    with pytest.raises(StreamCorrupt):
        read_decisions(memory_store)


def test_a_damaged_decision_hides_no_other(memory_store: MemoryStore) -> None:
    decisions, reader = Decisions(memory_store), FolderReader(memory_store, layout.DECISIONS, parse_decision)
    assert summarize_decisions(reader.read()) == {"count": 0, "latest": []}
    decisions.add(decision(5))
    assert reader.read() == [decision(5)]
    memory_store.put_if_absent(layout.decision(1), b"{}")
    decisions.all.append(decision(7))
    decisions.add(decision(9, "lower"))
    assert reader.read() == [decision(5), decision(9, "lower")]
    assert [shown["action"] for shown in summarize_decisions(reader.read())["latest"]] == ["raise", "lower"]


def test_a_rollback_gives_up_what_came_after_and_nothing_that_is_made_later() -> None:
    stored = [decision(9), decision(20, ROLL_BACK, incarnation=1)]
    assert rolled_back(stored, 1, 21)
    assert rolled_back(stored, 0, 30)
    assert not rolled_back(stored, 1, 20)
    assert not rolled_back(stored, 2, 21), "the trainer after it makes version 21 again"


def test_the_rate_factor_is_the_product_of_earlier_rollbacks() -> None:
    decisions = [
        decision(9, rate_factor=0.5),
        decision(20, ROLL_BACK, incarnation=1, rate_factor=0.1),
        decision(20, ROLL_BACK, incarnation=2, rate_factor=1 / 3),
    ]
    assert [rate_factor(decisions, n) for n in range(4)] == pytest.approx([1, 1, 0.1, 1 / 30])


def with_checkpoints(store: MemoryStore, *steps: int) -> int:
    """The incarnation of a trainer that made these checkpoints, each with an evaluation."""
    writer = CheckpointWriter(store)
    for step in steps:
        writer.commit(step, {"model": b"weights"}, {})
        evaluate(store, step, {"a": [("A", 1.0)]})
    return writer.incarnation


def test_it_goes_back_to_the_newest_checkpoint_from_before_the_collapse(memory_store: MemoryStore) -> None:
    incarnation = with_checkpoints(memory_store, 10, 20, 25)
    roll_back(memory_store, Decisions(memory_store), collapse(), incarnation=incarnation, max_staleness=BOUND)
    [stored] = read_decisions(memory_store)
    assert (stored.action, stored.policy_version, stored.incarnation) == (ROLL_BACK, 20, incarnation)
    assert [read_result(memory_store, step) is None for step in (10, 20, 25)] == [False, False, True]
    assert memory_store.list(layout.ANSWERS) == [layout.answers(10), layout.answers(20)]


@pytest.mark.parametrize(
    ("good_rate", "bad_rate", "factor"),
    [
        (RATE, RATE, 1 / 3),
        (RATE, RATE / 2, 1 / 3),
        (RATE, 10 * RATE, 0.1),
        (RATE, 2 * RATE, 1 / 3),
        (None, RATE, 1 / 3),
        (0.0, 0.0, 1 / 3),
    ],
)
def test_the_rate_goes_back_to_the_good_one_and_to_at_most_a_third(
    memory_store: MemoryStore, good_rate: float | None, bad_rate: float, factor: float
) -> None:
    incarnation, decisions = with_checkpoints(memory_store, 10, 20), Decisions(memory_store)
    cause = collapse(good_rate=good_rate, bad_rate=bad_rate)
    roll_back(memory_store, decisions, cause, incarnation=incarnation, max_staleness=BOUND)
    [stored] = read_decisions(memory_store)
    assert stored.measured["rate_factor"] == pytest.approx(factor)
    assert stored.measured["bad_rate"] == bad_rate
    assert rate_factor([stored], incarnation + 1) == stored.measured["rate_factor"]


def test_without_a_checkpoint_from_before_a_person_is_asked(memory_store: MemoryStore) -> None:
    incarnation = with_checkpoints(memory_store, 25)
    with pytest.raises(TrainingDiverged):
        roll_back(memory_store, Decisions(memory_store), collapse(), incarnation=incarnation, max_staleness=BOUND)
    assert read_decisions(memory_store) == []


def test_a_run_is_rolled_back_three_times_at_most(memory_store: MemoryStore) -> None:
    incarnation, decisions = with_checkpoints(memory_store, 10), Decisions(memory_store)
    for _ in range(3):
        roll_back(memory_store, decisions, collapse(), incarnation=incarnation, max_staleness=BOUND)
    with pytest.raises(TrainingDiverged):
        roll_back(memory_store, decisions, collapse(), incarnation=incarnation, max_staleness=BOUND)
