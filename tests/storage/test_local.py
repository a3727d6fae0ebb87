"""What only a store on a file system can get wrong."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

from storage.local import LocalStore

REPOSITORY = Path(__file__).parents[2]

RACER = """
import sys
from storage.local import LocalStore
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


def test_opening_a_store_creates_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "new")
    assert store.list() == []
    assert not store.exists("a")
    assert list(tmp_path.iterdir()) == []


def test_without_fsync_the_contract_is_the_same(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "new", fsync=False)
    assert store.put_if_absent("a/b", b"first")
    assert not store.put_if_absent("a/b", b"second")
    assert bytes(store.get("a/b")) == b"first"


def test_a_relative_root_stays_the_same_place_when_opened_by_url(tmp_path: Path) -> None:
    assert Path(LocalStore("runs/x").url).is_absolute()
