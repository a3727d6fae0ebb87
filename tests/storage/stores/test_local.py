"""What only a store on a file system can get wrong."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.stores.small_disk import make_read_only

from storage.errors import BadName, NotInStore, StoreDenied, StoreFull, StoreRefused
from storage.stores.base import probe
from storage.stores.local import LocalStore

REPOSITORY = Path(__file__).parents[3]

RACER = """
import sys
from storage.stores.local import LocalStore
store = LocalStore(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for name in range(200):
    if store.put_if_absent(f"race/{name}", sys.argv[2].encode() * 100):
        print(name, sys.argv[2])
"""


def test_of_processes_racing_for_a_name_one_wins_and_its_content_stays(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), name],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    lines = "".join(racer.communicate()[0] for racer in racers).splitlines()
    winners = dict(line.split() for line in lines)
    assert Counter(line.split()[0] for line in lines) == Counter(str(name) for name in range(200))
    store = LocalStore(tmp_path)
    assert all(store.get(f"race/{name}") == winner.encode() * 100 for name, winner in winners.items())


def test_unfinished_writes_are_never_listed_and_none_is_left_behind(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_if_absent("a/once", b"1")
    store.put_if_absent("a/once", b"2")
    store.put("a/often", b"1")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["often", "once"]
    (tmp_path / "a" / ".tmp-of-a-killed-writer").write_bytes(b"half")
    assert store.list() == ["a/often", "a/once"]


@pytest.mark.parametrize("write", [LocalStore.put, LocalStore.put_if_absent])
def test_on_a_full_disk_nothing_is_published_and_old_objects_stay(
    make_small_disk: Callable[[int], Path], write: Callable[[LocalStore, str, bytes], object]
) -> None:
    store = LocalStore(make_small_disk(2) / "run")
    store.put("old", b"o" * 1_000_000)
    with pytest.raises(StoreFull):
        write(store, "a/new", b"n" * 2_000_000)
    assert not store.exists("a/new")
    assert [path.name for path in store.root.rglob("*") if path.is_file()] == ["old"]
    with pytest.raises(StoreFull):
        store.put("old", b"p" * 2_000_000)
    assert store.get("old") == b"o" * 1_000_000
    store.delete("old")
    write(store, "a/new", b"n" * 1_000_000)
    assert store.get("a/new") == b"n" * 1_000_000


def test_a_full_disk_is_refused_by_the_probe(make_small_disk: Callable[[int], Path]) -> None:
    store = LocalStore(make_small_disk(1))
    with pytest.raises(StoreFull):
        for number in range(2_000):
            store.put(f"{number}", bytes(4096))
    with pytest.raises(StoreRefused):
        probe(store)


def test_a_disk_that_is_read_only_can_be_read_and_nothing_else(make_small_disk: Callable[[int], Path]) -> None:
    disk = make_small_disk(1)
    store = LocalStore(disk)
    store.put("a/b", b"here")
    make_read_only(disk)
    assert bytes(store.get("a/b")) == b"here"
    assert store.list() == ["a/b"]
    changes: list[Callable[[], object]] = [
        lambda: store.put("c", b""),
        lambda: store.put_if_absent("c", b""),
        lambda: store.delete("a/b"),
        lambda: store.delete_tree("a"),
    ]
    for change in changes:
        with pytest.raises(StoreDenied):
            change()
    with pytest.raises(StoreRefused):
        probe(store)


def test_a_folder_of_somebody_elses_is_denied_and_never_told_to_be_empty(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("closed/a", b"here")
    (tmp_path / "closed").chmod(0)
    if os.access(tmp_path / "closed", os.R_OK):
        pytest.skip("this user, probably root, may read and write everything")
    looks: list[Callable[[], object]] = [
        lambda: store.get("closed/a"),
        lambda: store.exists("closed/a"),
        lambda: store.entries(),
        lambda: store.put("closed/b", b""),
        lambda: store.put_if_absent("closed/b", b""),
        lambda: store.delete("closed/a"),
        lambda: store.delete_tree("closed"),
    ]
    try:
        for look in looks:
            with pytest.raises(StoreDenied):
                look()
    finally:
        (tmp_path / "closed").chmod(0o700)


def test_what_is_read_stays_whole_while_it_is_replaced(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"0" * 3_000_000)
    held = [store.get("a")]
    for digit in b"123":
        store.put("a", bytes([digit]) * (3_000_000 - digit))
        held.append(store.get("a"))
    assert [len(set(bytes(view))) for view in held] == [1, 1, 1, 1]
    assert [chr(view[0]) for view in held] == ["0", "1", "2", "3"]


def test_a_folder_that_was_deleted_can_be_written_to_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for content in (b"1", b"2"):
        assert store.put_if_absent("a/b/c", content)
        assert bytes(store.get("a/b/c")) == content
        store.delete_tree("a")
    assert store.list() == []


def test_what_is_no_file_is_not_in_the_store_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    store = LocalStore(tmp_path)
    for path in ("pipe", "folder"):
        assert not store.exists(path)
        with pytest.raises(NotInStore):
            store.get(path)


def test_a_name_that_the_file_system_does_not_take_is_a_sentence(tmp_path: Path) -> None:
    for store, path in ((LocalStore(tmp_path), "x" * 300), (LocalStore(f"/{'y/' * 3000}"), "run.json")):
        for call in (store.get, store.exists, lambda path, store=store: store.put(path, b"")):
            with pytest.raises(BadName) as refused:
                call(path)
            assert len(str(refused.value)) < 500


def test_a_root_that_is_a_file_or_below_one_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        store = LocalStore(root)
        for write in (store.put, store.put_if_absent):
            with pytest.raises(StoreRefused):
                write("a/b", b"")
