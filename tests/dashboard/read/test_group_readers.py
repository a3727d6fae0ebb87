"""The pages' readers of a run: made once, and complete as soon as the run is."""

from pathlib import Path

from support.stored_run.run import Shape, make_run
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dashboard.read.group_readers import GroupReaders
from dashboard.read.run_reader import RunReader
from storage.stores.local import LocalStore


def test_a_run_seen_before_it_had_a_tokenizer_shows_texts_once_it_has_one(tmp_path: Path) -> None:
    store, readers = LocalStore(tmp_path / "mine", fsync=False), GroupReaders()
    make_run(store, "mine", Shape(steps=1, groups_per_step=1, group_size=2, generators=1))
    run = RunReader(store).look()
    groups, texts = readers.of(run)
    assert texts.text([0]) == "0"
    store.put_if_absent("start/tokenizer.json", Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str().encode())
    assert readers.of(run)[1].text([0]) == "a"
    assert readers.of(run)[0] is groups
    assert readers.of(run)[1] is readers.of(run)[1]
