"""Which start model and tokenizer a run began with."""

import hashlib
from pathlib import Path

import pytest
from support.stores.dict_store import DictStore

from millrace.runs.start_hashes import read_start_hashes, record_start_hashes

FILES = {"model.safetensors": b"weights", "config.json": b"{}", "tokenizer.json": b"{ }", "merges.txt": b"a b"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_each_file_has_the_hash_that_sha256sum_prints(folder: Path) -> None:
    store = DictStore()
    assert read_start_hashes(store) is None
    record_start_hashes(store, folder)
    assert read_start_hashes(store) == {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}


def test_what_neither_makes_weights_nor_tokens_is_left_out(folder: Path) -> None:
    (folder / "README.md").write_text("a model")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"the same in another format")
    store = DictStore()
    record_start_hashes(store, folder)
    assert read_start_hashes(store) is not None
    assert set(read_start_hashes(store) or {}) == set(FILES)


def test_a_run_keeps_the_hashes_of_what_it_began_with_whatever_the_folder_holds_later(folder: Path) -> None:
    store = DictStore()
    record_start_hashes(store, folder)
    before = read_start_hashes(store)
    (folder / "model.safetensors").write_bytes(b"other weights")
    record_start_hashes(store, folder)
    assert read_start_hashes(store) == before
