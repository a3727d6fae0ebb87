"""The newest groups in the exported file: the rows of the store, and a sentence where they are damaged."""

from pathlib import Path

import pytest
from support.stored_run.run import Shape, make_run
from support.streams.rows import part_files, read_rows

from dashboard.export.page import MOST_GROUPS, newest_groups
from dashboard.read.model import RunData
from dashboard.read.run_reader import RunReader
from dashboard.views.blocks import Rows, Table, View
from storage import layout
from storage.schema import TRAJECTORY
from storage.stores.base import Store
from storage.stores.factory import open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(str(tmp_path / "mine"))
    make_run(store, "mine", Shape(steps=8, groups_per_step=4, group_size=4, generators=2))
    return store


def _tables(run: RunData, view: View) -> list[tuple[str, Rows]]:
    return [(block.title, block.build([run])) for block in view.blocks if isinstance(block, Table)]


def test_the_newest_groups_are_shown_with_the_rows_of_the_store(store: Store) -> None:
    run = RunReader(store).look()
    view = newest_groups(run)
    tables = _tables(run, view)
    assert len(tables) == MOST_GROUPS
    assert f"newest {MOST_GROUPS} groups that the trainer of mine took" in view.sentence
    last_group = int(run.consumed["group_id"][-1])
    title, rows = tables[0]
    assert title == f"Group {last_group}"
    assert [row[0] for row in rows.rows] == [f"{row_id:,}" for row_id in run.consumed["trajectory_row_id"][-4:]]
    rows_of_generator = read_rows(store, layout.trajectories(int(run.consumed["generator"][-1])), TRAJECTORY)
    stored = {f"{row['row_id']:,}": row for row in rows_of_generator}
    for row, staleness in zip(rows.rows, run.consumed["staleness"][-4:], strict=True):
        expected = stored[row[0]]
        values = dict(zip(rows.header, row, strict=True))
        assert values["staleness"] == str(staleness)
        assert values["versions"] == f"{expected['min_policy_version']} to {expected['max_policy_version']}"
        assert values["tokens"] == f"{len(expected['response_tokens']):,}"
        # This store has no tokenizer.
        assert values["response"] == " ".join(map(str, expected["response_tokens"]))


@pytest.mark.slow
def test_a_group_whose_part_is_damaged_says_so_and_the_others_are_shown(store: Store) -> None:
    run = RunReader(store).look()
    generator = int(run.consumed["generator"][-1])
    for path in part_files(store, layout.trajectories(generator)):
        store.delete(path)
        store.put(path, b"damaged")
    tables = _tables(run, newest_groups(run))
    damaged = [rows for _, rows in tables if "can't be read" in rows.note]
    # The witness: some of them lie in the damaged stream, the rest in the other generator's.
    assert 0 < len(damaged) < len(tables)
    assert all(row[-1] == "can't be read" for rows in damaged for row in rows.rows)
    assert all(row[-1] != "can't be read" for _, rows in tables if rows not in damaged for row in rows.rows)
