"""A made-up run is one that all of Millrace believes: its ledger balances, its files are sound, it can go on."""

import pytest
from support.stored_run.run import Shape, StoredRun, make_run
from support.stores.dict_store import DictStore

from millrace.maintenance.fsck import fsck
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.loader import RolloutLoader
from millrace.runs.status import StatusReader
from storage import layout
from storage.checkpoints import read_latest
from storage.schema import CONSUMED
from storage.streams.stream import StreamReader

SHAPE = Shape(steps=30, generators=2, scorers=2, steps_per_part=3, stale_share=0.2, error_share=0.2, seed=3)


def consumed(store: DictStore) -> list[dict[str, object]]:
    reader, rows = StreamReader(store, layout.CONSUMED, CONSUMED), list[dict[str, object]]()
    while (part := reader.next()) is not None:
        rows += part.table.to_pylist()
    return rows


def test_its_ledger_balances_at_every_moment_and_nothing_of_it_is_damaged() -> None:
    store = DictStore()
    run = StoredRun(store, "made", SHAPE)
    for steps in (1, 4, 9):
        run.append(steps)
        status = StatusReader(store).look()
        assert status["steps"] == run.policy_version
        assert status["ledger"]["buffered"]["rollouts"] == status["ledger"]["in_flight"]["rollouts"] == 0
    run.finish()
    ledger = StatusReader(store).look()["ledger"]
    assert set(ledger["dropped"]) == {"stale", "error"}
    assert ledger["buffered"]["rollouts"] > 0
    assert ledger["in_flight"]["rollouts"] > 0
    assert fsck(store).findings == []


def test_its_rows_keep_the_rules_of_those_that_a_trainer_writes() -> None:
    store = DictStore()
    make_run(store, "made", SHAPE)
    rows = consumed(store)
    bound = SHAPE.max_staleness
    assert {row["outcome"] for row in rows} == {"trained", "stale", "error"}
    for row in rows:
        assert (row["outcome"] == "stale") == (row["staleness"] > bound)
        assert 0 <= row["staleness_in_flight"] <= row["staleness"]
        assert row["max_policy_version"] < row["policy_version"]
        assert (row["advantage"] is None) == (row["outcome"] != "trained")
        assert row["outcome"] != "error" or row["reward"] is None
    trained = [row for row in rows if row["outcome"] != "stale"]
    assert len(trained) == SHAPE.steps * SHAPE.groups_per_step * SHAPE.group_size


def test_an_intake_opens_at_its_checkpoint_and_finds_what_nobody_took() -> None:
    store = DictStore()
    run = make_run(store, "made", SHAPE)
    run.finish()
    latest = read_latest(store)
    assert latest is not None
    loader = RolloutLoader(
        store,
        reward="exact_match",
        num_generators=2,
        num_scorers=2,
        vocab_size=128,
        lineage=Lineage.after(latest, 1),
        state=latest.state["intake"],
    )
    group = loader.take()
    assert group is not None
    assert group.generator == 0, "what the last generator made was left unscored"


def test_the_same_seed_makes_the_same_rows_and_another_one_others() -> None:
    def rows(seed: int) -> list[dict[str, object]]:
        store = DictStore()
        StoredRun(store, "made", Shape(steps=3, seed=seed)).append(3)
        return [{name: value for name, value in row.items() if name != "t"} for row in consumed(store)]

    assert rows(1) == rows(1) != rows(2)


def test_it_can_be_gone_on_with_as_long_as_it_is_not_finished() -> None:
    store = DictStore()
    StoredRun(store, "made", SHAPE).append(3)
    again = StoredRun(store, "made", SHAPE)
    again.append(3)
    assert again.policy_version == 6
    assert StatusReader(store).look()["steps"] == 6
    assert {row["incarnation"] for row in consumed(store)} == {0, 1}
    again.finish()
    with pytest.raises(ValueError, match="this run was finished"):
        StoredRun(store, "made", SHAPE)
