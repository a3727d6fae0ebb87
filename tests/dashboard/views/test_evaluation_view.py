"""The page of evaluations: two versions and their questions, or why there are none."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from support.evaluation.evaluated import Answers, evaluate
from support.pages.sites import open_site, store_run
from support.stored_run.run import StoredRun

from dashboard.read.model import RunData
from dashboard.read.run_reader import RunReader
from dashboard.views.blocks import Rows
from dashboard.views.display import DEFAULT, Display
from dashboard.views.evaluation import MOST_QUESTIONS, view
from storage import layout

EVIL = "<script>alert(1)</script>\u202e"
FIRST: Mapping[str, Answers] = {"a": [("A", 1.0)], "b": [("x", 0.0)], "c": [("x", 0.0)]}
SECOND: Mapping[str, Answers] = {"a": [("x", 0.0)], "b": [("B", 1.0)], "c": [("y", 0.0)]}
THIRD: Mapping[str, Answers] = {"a": [("A", 1.0)], "b": [("B", 1.0)], "c": [("C", 1.0)]}


@pytest.fixture
def stored(tmp_path: Path) -> StoredRun:
    run = store_run(tmp_path, "mine")
    for version, answers in enumerate((FIRST, SECOND, THIRD)):
        evaluate(run.store, version, answers)
    return run


def tables(run: StoredRun | RunData, display: Display = DEFAULT) -> tuple[Rows, Rows]:
    """The counts and the questions."""
    data = RunReader(run.store).look() if isinstance(run, StoredRun) else run
    counts, questions = (block.build([data]) for block in view(display).blocks)
    assert isinstance(counts, Rows) and isinstance(questions, Rows)
    return counts, questions


def test_the_first_and_the_newest_version_are_compared(stored: StoredRun) -> None:
    counts, questions = tables(stored)
    assert counts.note == "Version 0 before, version 2 after."
    assert list(counts.rows) == [("held_out", "0", "2", "0", "1")]
    assert list(questions.rows) == [
        ("✓ wrong → right", "b", "B", "x", "B"),
        ("✓ wrong → right", "c", "C", "x", "C"),
        ("still right", "a", "A", "A", "A"),
    ]


def test_two_other_versions_are_compared_if_chosen(stored: StoredRun) -> None:
    counts, questions = tables(stored, Display(before=0, after=1))
    assert counts.note == "Version 0 before, version 1 after."
    assert [row[0] for row in questions.rows] == ["✕ right → wrong", "✓ wrong → right", "still wrong"]


def test_samples_have_a_column_if_there_are_any(stored: StoredRun) -> None:
    for version, rewards in ((0, (0.0, 0.0)), (2, (1.0, 0.0))):
        evaluate(stored.store, version, {"a": [("A", 1.0), *(("s", reward) for reward in rewards)]})
    _, questions = tables(stored)
    assert [row[-1] for row in questions.rows] == ["0 of 2 → 1 of 2"]
    assert questions.header[-1] == "samples right"


def test_what_a_model_wrote_is_escaped_and_cut(stored: StoredRun) -> None:
    evaluate(stored.store, 2, {"a": [(f"{EVIL}\n{'-' * 9_000}", 0.0)]})
    _, questions = tables(stored)
    [row] = questions.rows
    assert row[-1].startswith("<script>alert(1)</script>\\u202e\n---")
    assert len(row[-1]) < 500


def test_no_change_hides_the_others_however_many_there_are(stored: StoredRun) -> None:
    many: dict[str, Answers] = {str(number): [("x", 0.0)] for number in range(MOST_QUESTIONS + 20)}
    evaluate(stored.store, 0, {**many, "a": [("A", 1.0)]})
    evaluate(stored.store, 2, {**many, "a": [("A", 1.0)]})
    counts, questions = tables(stored)
    assert list(counts.rows) == [("held_out", "0", "0", str(MOST_QUESTIONS + 20), "1")]
    assert len(questions.rows) == MOST_QUESTIONS + 1


def test_a_new_evaluation_of_a_version_is_read(stored: StoredRun) -> None:
    assert tables(stored)[0].rows
    evaluate(stored.store, 2, {"c": [("C", 1.0)]}, t=60.0)
    assert [row[1] for row in tables(stored)[1].rows] == ["c"]


def test_a_run_without_answers_says_so(tmp_path: Path) -> None:
    run = store_run(tmp_path, "old")
    assert tables(run)[0].note == "Fewer than two versions were evaluated yet."
    evaluate(run.store, 0, FIRST)
    run.evaluate(0.5)
    counts, questions = tables(run)
    assert (list(counts.rows), list(questions.rows)) == ([], [])
    assert counts.note == "The run has no stored answers of version 3."
    assert tables(run, Display(after=7))[0].note == "Version 7 was not evaluated."


def test_damaged_answers_are_named(stored: StoredRun, tmp_path: Path) -> None:
    file = tmp_path / "mine" / layout.answers(2)
    file.write_bytes(file.read_bytes()[:-9])
    counts, questions = tables(stored)
    assert counts.note.startswith("The answers can't be read: answers/00000002.parquet")
    assert list(questions.rows) == []


def test_several_runs_have_their_own_versions(stored: StoredRun, tmp_path: Path) -> None:
    other = store_run(tmp_path, "other")
    evaluate(other.store, 0, FIRST)
    evaluate(other.store, 3, SECOND)
    runs = [RunReader(run.store).look() for run in (stored, other)]
    counts = view().blocks[0].build(runs)
    assert isinstance(counts, Rows)
    assert counts.note == "mine: Version 0 before, version 2 after. other: Version 0 before, version 3 after."
    assert [row[0] for row in counts.rows] == ["mine", "other"]


def test_the_page_is_drawn_anew_when_another_version_was_evaluated(stored: StoredRun, tmp_path: Path) -> None:
    shown = open_site(tmp_path).show("/run/mine/evaluation", "")
    options = str(shown.body)
    assert "/run/mine/evaluation?before=1&after=2" in options and "/run/mine/evaluation?before=0&after=1" in options
    assert not open_site(tmp_path).refresh("/run/mine/evaluation", "", shown.drawn_from, [], []).again
    evaluate(stored.store, 3, THIRD)
    assert open_site(tmp_path).refresh("/run/mine/evaluation", "", shown.drawn_from, [], []).again
