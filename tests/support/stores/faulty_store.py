"""A store that fails on purpose, in ways that are named, seeded and counted.

    latency          any call takes up to `LATENCY_SECONDS` longer
    error_before     any call fails with EIO and has done nothing
    error_after      a write is done, and fails with EIO all the same
    lost_reply       a create is done, and says "something is there", as a retried conditional PUT does
    stale_read       a log record that this store's user looked for too early stays absent for its next looks
    bit_flip         a read returns the object with one bit flipped; the object itself stays whole
    ─────────────── from here on the store breaks its promises ───────────────
    torn_put         a write fails with EIO and leaves part of its data under the final name
    dropped_fsync    a write is done, and undone by `crash()`: a power cut on a disk that lied

Each fault draws from a separate random stream: switching another one on does not move it.
"""

import errno
import fnmatch
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from storage.errors import NotInStore
from storage.stores.base import BytesLike, Entry, Store

LATENCY_SECONDS = 0.002
FAULTS = (
    "latency",
    "error_before",
    "error_after",
    "lost_reply",
    "stale_read",
    "bit_flip",
    "torn_put",
    "dropped_fsync",
)
_LONGEST_STALE = 3
_RECORDS = "*/log/*"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """When a fault strikes."""

    rate: float = 0.0
    """Chance of each call that it can strike."""
    calls: frozenset[int] = frozenset()
    """It strikes these, too: ordinals from 0 of the calls that it can strike."""
    paths: str = "*"
    """Glob of the store paths at which it can strike."""


class FaultyStore(Store):
    """`inner`, seen through faults, each given by its name as a `Fault` or as a rate.

    Several users of one store get a FaultyStore each, over the same inner one. A seed repeats its faults exactly
    where one thread uses the store; a reader that reads ahead, as it does where `inner` is not local, uses several.
    """

    def __init__(self, inner: Store, seed: int, **faults: Fault | float) -> None:
        unknown = set(faults) - set(FAULTS)
        if unknown:
            raise ValueError(f"unknown faults: {sorted(unknown)}; expected some of {FAULTS}")
        self.url = inner.url
        self.poll_seconds = inner.poll_seconds
        self.fired: Counter[str] = Counter()
        """How often each fault struck: the witness of the test that relies on it."""
        self._inner = inner
        self._faults = {name: f if isinstance(f, Fault) else Fault(rate=f) for name, f in faults.items()}
        self._random = {name: random.Random(f"{seed} {name}") for name in FAULTS}
        self._met: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._stale: dict[str, int] = {}
        self._unsynced: dict[str, bytes | None] = {}

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        self._before(path)
        # A user that has tried to create it knows that it exists: no look is stale after that.
        self._stale[path] = 0
        return self._write(self._inner.put_if_absent, path, data) and not self._strikes("lost_reply", path)

    def put(self, path: str, data: BytesLike) -> None:
        self._before(path)
        self._write(self._inner.put, path, data)

    def get(self, path: str, start: int = 0, length: int | None = None) -> memoryview:
        self._before(path)
        if not self._inner.exists(path):
            self._remember_absent(path)
        elif self._stale.get(path, 0) > 0:
            self._stale[path] -= 1
            self._count("stale_read")
            raise NotInStore(f"{path}: not in {self.url}")
        data = self._inner.get(path, start, length)
        if len(data) and self._strikes("bit_flip", path):
            return memoryview(flipped(data, self._random["bit_flip"].randrange(8 * len(data))))
        return data

    def exists(self, path: str) -> bool:
        self._before(path)
        return self._inner.exists(path)

    def entries(self, prefix: str = "") -> list[Entry]:
        self._before(prefix)
        return self._inner.entries(prefix)

    def delete(self, path: str) -> None:
        self._before(path)
        self._inner.delete(path)

    def delete_tree(self, prefix: str) -> None:
        self._before(prefix)
        self._inner.delete_tree(prefix)

    def local_path(self, path: str) -> Path | None:
        return self._inner.local_path(path)

    def crash(self) -> list[str]:
        """The power fails: every write that dropped its fsync is undone. The paths of those, in order of writing."""
        lost = list(self._unsynced)
        for path, before in self._unsynced.items():
            if before is None:
                self._inner.delete(path)
            else:
                self._inner.put(path, before)
        self._unsynced.clear()
        return lost

    def _before(self, path: str) -> None:
        if self._strikes("latency", path):
            time.sleep(self._random["latency"].uniform(0, LATENCY_SECONDS))
        self._fail("error_before", path, self._draws("error_before", path))

    def _remember_absent(self, path: str) -> None:
        """Some users' first look at a record that is not there yet answers their next looks as well."""
        if path not in self._stale and fnmatch.fnmatchcase(path, _RECORDS):
            looks = self._random["stale_read"].randint(1, _LONGEST_STALE)
            self._stale[path] = looks if self._draws("stale_read", path) else 0

    def _write(self, write: Callable[[str, BytesLike], bool | None], path: str, data: BytesLike) -> bool:
        before = bytes(self._inner.get(path)) if self._inner.exists(path) else None
        if self._draws("torn_put", path):
            data = bytes(data)[: self._random["torn_put"].randrange(max(1, len(data)))]
            self._fail("torn_put", path, write(path, data) is not False)
        if write(path, data) is False:
            return False
        if self._strikes("dropped_fsync", path):
            self._unsynced.setdefault(path, before)
        self._fail("error_after", path, self._draws("error_after", path))
        return True

    def _fail(self, name: str, path: str, strikes: bool) -> None:
        if strikes:
            self._count(name)
            raise OSError(errno.EIO, f"fault {name}", path)

    def _strikes(self, name: str, path: str) -> bool:
        """Whether the fault strikes this call; it is counted."""
        strikes = self._draws(name, path)
        if strikes:
            self._count(name)
        return strikes

    def _draws(self, name: str, path: str) -> bool:
        fault = self._faults.get(name)
        if fault is None or not fnmatch.fnmatchcase(path, fault.paths):
            return False
        with self._lock:
            call = self._met[name]
            self._met[name] += 1
            return call in fault.calls or self._random[name].random() < fault.rate

    def _count(self, name: str) -> None:
        with self._lock:
            self.fired[name] += 1


def flip_a_bit(file: Path) -> None:
    """Flips a bit in the middle of a file."""
    data = file.read_bytes()
    file.write_bytes(flipped(data, 8 * (len(data) // 2)))


def flipped(data: BytesLike, bit: int) -> bytes:
    """`data` with bit number `bit` flipped, counted from the lowest bit of the first byte."""
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)
