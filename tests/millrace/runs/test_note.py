"""A person's note on a run, by the module and by the command."""

from pathlib import Path

import pytest
from support.stored_run.run import Shape, StoredRun

from flows.cli.main import main
from millrace.errors import InputError, RunMissing
from millrace.maintenance.fsck import fsck
from millrace.runs.note import MAX_CHARACTERS, read_note, write_note
from storage import layout
from storage.stores.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "noted", fsync=False)
    StoredRun(store, "noted", Shape(steps=2)).append(1)
    return store


def test_a_note_is_one_line_that_the_next_one_replaces_and_an_empty_one_removes(store: LocalStore) -> None:
    assert read_note(store) == ""
    write_note(store, "  the baseline:\n keep ü ")
    assert read_note(store) == "the baseline: keep ü"
    write_note(store, "another")
    assert read_note(store) == "another"
    write_note(store, " ")
    assert not store.exists(layout.NOTE)


def test_a_note_that_is_too_long_or_of_no_run_is_refused(store: LocalStore, tmp_path: Path) -> None:
    write_note(store, "x" * MAX_CHARACTERS)
    with pytest.raises(InputError):
        write_note(store, "x" * (MAX_CHARACTERS + 1))
    assert read_note(store) == "x" * MAX_CHARACTERS
    with pytest.raises(RunMissing):
        write_note(LocalStore(tmp_path / "none"), "x")
    assert not (tmp_path / "none").exists()


def test_the_command_shows_a_note_and_replaces_it(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    url = store.url
    assert main(["note", url, "keep this one"]) == 0
    assert main(["note", url]) == 0
    assert capsys.readouterr().out == "keep this one\n"
    assert main(["note", url, ""]) == 0
    assert read_note(store) == ""
    assert main(["note", f"{url}-none"]) == 2
    assert "expected run.json there" in capsys.readouterr().err


def test_a_note_is_part_of_a_sound_run(store: LocalStore) -> None:
    write_note(store, "keep")
    assert layout.NOTE not in str(fsck(store))
    store.put("note.text", b"x")
    assert "note.text" in str(fsck(store))
