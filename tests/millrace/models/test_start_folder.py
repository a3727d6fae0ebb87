"""The start model that a run keeps: whole, or named with what to do."""

from pathlib import Path

import pytest

from millrace.models.start_folder import start_folder, store_start_model
from storage.errors import StreamCorrupt
from storage.stores.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    (tmp_path / "made").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "made" / name).write_text(name)
    made = LocalStore(tmp_path / "run")
    store_start_model(made, tmp_path / "made")
    return made


def test_the_folder_holds_what_was_stored(store: LocalStore, tmp_path: Path) -> None:
    folder = start_folder(store, None, tmp_path)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        name: name for name in ("config.json", "model.safetensors")
    }


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("start/config.json", None, "the file is missing"),
        ("start/config.json", "short", "the file has 5 bytes, expected 11"),
        ("start/model.safetensors", "Model.safetensors", "the file's checksum is [0-9a-f]{8}, expected [0-9a-f]{8}"),
        ("start.json", "[]", "unexpected content: .*"),
    ],
)
def test_damage_is_named_with_what_to_do(
    file: str, content: str | None, reason: str, store: LocalStore, tmp_path: Path
) -> None:
    path = store.root / file
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(StreamCorrupt, match=rf"^{file}: {reason}; restore this file from a copy of the run$"):
        start_folder(store, None, tmp_path)


def test_a_folder_in_place_of_the_list_is_named_with_what_to_do(store: LocalStore, tmp_path: Path) -> None:
    (store.root / "start.json").unlink()
    (store.root / "start.json").mkdir()
    with pytest.raises(StreamCorrupt, match=r"^start\.json: something else has its name; remove it and"):
        store_start_model(store, tmp_path / "made")
