"""The contract that every store keeps, and the probe that refuses one that does not."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stores.s3_server import S3Server, aws_environment

from storage.errors import BadName, NotInStore, StoreRefused
from storage.stores.base import BytesLike, Entry, Store, probe
from storage.stores.factory import open_store
from storage.stores.local import LocalStore
from storage.stores.memory import MemoryStore
from storage.stores.object_store import ObjectStore

ESCAPES = ["", "/etc/passwd", "../x", "a/../../x", "a/..", "./a", "a//b", "a/", "a\0b", "a\nb", "a/.tmp-x"]

BACKENDS = ["local", "memory", "moto_s3", pytest.param("ceph", marks=pytest.mark.ceph)]


@pytest.fixture(params=BACKENDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store of each kind."""
    if request.param == "local":
        yield LocalStore(tmp_path / "run")
    elif request.param == "memory":
        yield request.getfixturevalue("memory_store")
    else:
        server: S3Server = request.getfixturevalue(request.param)
        with aws_environment(server.environment):
            yield ObjectStore(f"s3://{server.make_bucket()}/runs/one")


def test_an_object_reads_back_as_written(store: Store) -> None:
    for size in (0, 1, 3_000_000):
        data = bytes(range(256)) * (size // 256 + 1)
        assert store.put_if_absent(f"a/b/{size}", data[:size])
        assert store.get(f"a/b/{size}") == data[:size]
        assert store.get(f"a/b/{size}").readonly


def test_a_range_reads_at_most_to_the_end(store: Store) -> None:
    data = bytes(range(256)) * 10_000
    store.put("a", data)
    for start, length in ((0, 1), (5, 0), (255, 1_500_000), (2_559_999, 1), (2_559_990, 100)):
        assert store.get("a", start, length) == data[start : start + length], (start, length)
        assert store.get("a", start, length).readonly
    assert store.get("a", 2_000_000) == data[2_000_000:]
    assert store.get("a", length=10) == data[:10]
    for start, length in ((len(data), 1), (len(data) + 5, 10), (len(data), 0)):
        assert len(store.get("a", start, length)) == 0
    assert len(store.get("a", len(data))) == 0
    store.put("empty", b"")
    assert len(store.get("empty", 0, 10)) == 0
    assert store.exists("empty")
    for start, length in ((0, 0), (0, 1), (3, None)):
        with pytest.raises(NotInStore):
            store.get("absent", start, length)


def test_the_second_put_if_absent_fails_and_changes_nothing(store: Store) -> None:
    assert store.put_if_absent("a", memoryview(b"first"))
    assert not store.put_if_absent("a", b"second")
    assert bytes(store.get("a")) == b"first"
    store.put("b", bytearray(b"put"))
    assert not store.put_if_absent("b", b"other")
    assert bytes(open_store(store.url).get("b")) == b"put"


def test_put_replaces_an_object_and_keeps_buffers_read_earlier(store: Store) -> None:
    store.put("a", b"old" * 1_000_000)
    previous = store.get("a")
    store.put("a", b"new")
    assert bytes(store.get("a")) == b"new"
    assert previous == b"old" * 1_000_000


def test_one_of_several_threads_creates_each_name(store: Store) -> None:
    start = threading.Barrier(4)
    won: list[tuple[int, int]] = []

    def race(racer: int) -> None:
        start.wait()
        won.extend((name, racer) for name in range(50) if store.put_if_absent(f"race/{name}", b"%d" % racer))

    threads = [threading.Thread(target=race, args=(racer,)) for racer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for name, _ in won) == list(range(50))
    assert all(store.get(f"race/{name}") == b"%d" % racer for name, racer in won)


def test_a_missing_object_is_an_error(store: Store) -> None:
    store.put("folder/x", b"")
    for path in ("absent", "folder", "folder/absent", "folder/x/y"):
        with pytest.raises(NotInStore):
            store.get(path)
        assert not store.exists(path)
    assert store.exists("folder/x")


def test_list_returns_every_path_below_a_folder_sorted(store: Store) -> None:
    assert store.list() == []
    for path in ("b/2", "b/1", "b/c/3", "bc/4", "a"):
        store.put(path, b"")
    assert store.list() == ["a", "b/1", "b/2", "b/c/3", "bc/4"]
    assert store.list("b") == ["b/1", "b/2", "b/c/3"]
    assert store.list("nowhere") == []


def test_folders_returns_direct_children_sorted(store: Store) -> None:
    assert store.folders() == store.folders("nowhere") == []
    for path in ("b/2", "b/c/3", "b/c/d/4", "b/a b/5", "bc/6", "ü~#?/7", "a"):
        store.put(path, b"")
    assert store.folders() == ["b", "bc", "ü~#?"]
    assert store.folders("b") == ["a b", "c"]
    assert store.folders("b/c") == ["d"]
    assert store.folders("b/c/d") == store.folders("a") == []
    for path in ("..", "b/../..", "/etc"):
        with pytest.raises(BadName):
            store.folders(path)


def test_entries_have_sizes_and_times(store: Store) -> None:
    start = time.time()
    store.put("b", b"12345")
    store.put("a/c", b"")
    entries = store.entries()
    assert [(entry.path, entry.bytes) for entry in entries] == [("a/c", 0), ("b", 5)]
    assert store.entries("a") == [entries[0]]
    # A store's clock counts in whole seconds here and there.
    assert all(start - 2 < entry.t_modified < time.time() + 2 for entry in entries)
    assert isinstance(entries[0], Entry)


def test_paths_may_hold_any_printable_character(store: Store) -> None:
    paths = sorted(["a b/ü%20~#?*[|]&=+", "x^{}`<>\\\"'$!,;:@", "…/.hidden", "%2e%2e/x"])
    for path in paths:
        assert store.put_if_absent(path, path.encode())
    assert store.list() == paths
    assert [bytes(store.get(path)).decode() for path in paths] == paths


@pytest.mark.slow
def test_more_objects_than_one_listing_holds_are_listed_and_deleted(store: Store) -> None:
    for number in range(1_050):
        store.put(f"many/{number:04d}", b"")
    assert store.list("many") == [f"many/{number:04d}" for number in range(1_050)]
    store.delete_tree("many")
    assert store.list() == []


def test_deleting_removes_that_path_alone_and_may_be_repeated(store: Store) -> None:
    for path in ("a/b", "a/bc", "b/1", "b/c/2", "bc/3"):
        store.put(path, b"")
    for _ in range(2):
        store.delete("a/b")
        store.delete("nowhere/at/all")
        store.delete_tree("b")
    assert store.list() == ["a/bc", "bc/3"]
    for path in ("a/b", "b/1"):
        assert not store.exists(path)
        assert store.put_if_absent(path, b"again")


def test_a_path_outside_the_root_is_refused_by_every_method(store: Store) -> None:
    calls = [store.get, store.exists, store.delete, store.delete_tree, store.list]
    calls += [lambda p: store.put(p, b"x"), lambda p: store.put_if_absent(p, b"x")]
    for path in ESCAPES:
        # The empty path is the root, which may be listed.
        for call in calls if path else [call for call in calls if call != store.list]:
            with pytest.raises(BadName):
                call(path)


def test_paths_and_file_urls_open_the_same_store(tmp_path: Path) -> None:
    LocalStore(tmp_path / "with space").put("a", b"here")
    for url in (f"{tmp_path}/with space", f"file://{tmp_path}/with%20space", f"file://localhost{tmp_path}/with space"):
        assert bytes(open_store(url).get("a")) == b"here"


def test_a_memory_store_contains_the_stores_below_it(memory_store: MemoryStore) -> None:
    open_store(f"{memory_store.url}/below").put("a", b"here")
    assert memory_store.list() == ["below/a"]
    name = memory_store.url.removeprefix("memory://")
    assert bytes(open_store("memory://").get(f"{name}/below/a")) == b"here"


def test_other_urls_are_refused() -> None:
    for url in ("", "ftp://host/x", "file://elsewhere/x", "S3://bucket", "s3:///x", "s3://b", "s3://bücket/x", "://x"):
        with pytest.raises(StoreRefused):
            open_store(url)
    for name in ("../x", "a/../../../x", "a//b"):
        with pytest.raises(BadName):
            open_store(f"memory://{name}")


@pytest.mark.parametrize("url", ["https://me:hidden@host/x", "gs://me:hidden/of@host/x", "abs://host/x?sig=hidden"])
def test_a_refused_url_is_shown_without_secrets(url: str) -> None:
    with pytest.raises(StoreRefused) as refused:
        open_store(url)
    assert "hidden" not in str(refused.value)
    assert "host/x" in str(refused.value)


def test_the_probe_accepts_each_store_and_leaves_nothing(store: Store) -> None:
    probe(store)
    probe(store)
    assert store.list() == []


class Overwriting(MemoryStore):
    """Ignores the condition, and says the file was created, as some object stores do."""

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        self.put(path, data)
        return True


class LyingOverwriting(Overwriting):
    """Overwrites, yet reports the second create as refused."""

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        is_new = not self.exists(path)
        return super().put_if_absent(path, data) and is_new


class ClaimingAll(MemoryStore):
    """Reports that every path exists."""

    def exists(self, path: str) -> bool:
        return True


class LostFirstReply(MemoryStore):
    """Creates exclusively, but loses the first reply: the retry finds the object that the first request created."""

    replies_lost = 0

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        created = super().put_if_absent(path, data)
        if self.replies_lost == 0:
            self.replies_lost = 1
            return False
        return created


def test_the_probe_accepts_a_store_whose_first_reply_was_lost(memory_store: MemoryStore) -> None:
    store = LostFirstReply(memory_store.url.removeprefix("memory://"))
    probe(store)
    assert store.replies_lost == 1


@pytest.mark.parametrize("fake", [Overwriting, LyingOverwriting, ClaimingAll])
def test_the_probe_refuses_a_broken_store_and_leaves_nothing(
    fake: type[MemoryStore], memory_store: MemoryStore
) -> None:
    store = fake(memory_store.url.removeprefix("memory://"))
    with pytest.raises(StoreRefused):
        probe(store)
    assert store.list() == []
