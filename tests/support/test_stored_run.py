"""A made-up run is one that all of Millrace believes: its ledger balances, its files are sound, it can be continued."""

from support.stored_run.run import Shape, StoredRun, make_run
from support.stores.dict_store import DictStore
from support.streams.rows import read_rows

from millrace.maintenance.fsck import fsck
from millrace.runs.status import StatusReader
from storage import layout
from storage.schema import CONSUMED, TRAJECTORY

SHAPE = Shape(steps=30, generators=2, scorers=2, steps_per_part=3, stale_share=0.2, error_share=0.2, seed=3)


def test_its_ledger_balances_at_every_moment_and_nothing_is_damaged() -> None:
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
    rows = read_rows(store, layout.CONSUMED, CONSUMED)
    prompts = {
        (generator, row["row_id"]): row["prompt_id"]
        for generator in range(SHAPE.generators)
        for row in read_rows(store, layout.trajectories(generator), TRAJECTORY)
    }
    bound = SHAPE.max_staleness
    assert {row["outcome"] for row in rows} == {"trained", "stale", "error"}
    for row in rows:
        assert (row["outcome"] == "stale") == (row["staleness"] > bound)
        assert 0 <= row["staleness_in_flight"] <= row["staleness"]
        assert row["prompt_id"] == prompts[row["generator"], row["trajectory_row_id"]]
        assert row["max_policy_version"] < row["policy_version"]
        assert (row["advantage"] is None) == (row["outcome"] != "trained")
        assert row["outcome"] != "error" or row["reward"] is None
    trained = [row for row in rows if row["outcome"] != "stale"]
    assert len(trained) == SHAPE.steps * SHAPE.groups_per_step * SHAPE.group_size


def test_it_can_be_continued_until_it_is_finished() -> None:
    store = DictStore()
    StoredRun(store, "made", SHAPE).append(3)
    again = StoredRun(store, "made", SHAPE)
    again.append(3)
    assert again.policy_version == StatusReader(store).look()["steps"] == 6
    assert {row["incarnation"] for row in read_rows(store, layout.CONSUMED, CONSUMED)} == {0, 1}
