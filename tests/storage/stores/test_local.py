"""Properties of a store on a file system alone: races, full and read-only disks, other files in its folder."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.stores.small_disk import make_read_only

from storage.errors import BadName, StoreDenied, StoreFull, StoreRefused
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


def test_one_of_two_processes_creates_each_name(tmp_path: Path) -> None:
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


def test_unfinished_writes_are_never_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_if_absent("a/once", b"1")
    store.put_if_absent("a/once", b"2")
    store.put("a/often", b"1")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["often", "once"]
    (tmp_path / "a" / ".tmp-of-a-killed-writer").write_bytes(b"half")
    assert store.list() == ["a/often", "a/once"]


@pytest.mark.parametrize("write", [LocalStore.put, LocalStore.put_if_absent])
def test_a_full_disk_publishes_nothing_and_keeps_old_objects(
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


def test_a_read_only_disk_can_be_read_and_not_written(make_small_disk: Callable[[int], Path]) -> None:
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


def test_an_unreadable_folder_is_denied_and_not_empty(tmp_path: Path) -> None:
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


def test_a_name_that_the_file_system_rejects_is_refused_briefly(tmp_path: Path) -> None:
    for store, path in ((LocalStore(tmp_path), "x" * 300), (LocalStore(f"/{'y/' * 3000}"), "run.json")):
        for call in (store.get, store.exists, lambda path, store=store: store.put(path, b"")):
            with pytest.raises(BadName) as refused:
                call(path)
            assert len(str(refused.value)) < 500


@pytest.mark.parametrize("root", ["file", "file/below"])
def test_a_root_that_is_a_file_or_below_one_is_refused(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = LocalStore(tmp_path / root)
    for write in (lambda: store.put("a/b", b""), lambda: store.put_if_absent("a/b", b""), lambda: probe(store)):
        with pytest.raises(StoreRefused):
            write()
