"""The groups that answer one prompt, at all policy versions.

Streams are not sorted by prompt, so every part has to be read once; the prompts of its groups are cached as hashes:

    records of all generators, newest first ─► unread parts, within the limits ─► hash of each group's prompt ─► cache
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dashboard.read.parts import PartReader, StreamIndex
from storage.streams.record import Record

MAX_PARTS, MAX_BYTES = 256, 256 << 20
"""Limits on unread parts per search; at least one part is read."""


class PromptGroup(NamedTuple):
    """A group that answers the prompt."""

    policy_version: int
    """Oldest version that sampled a token of its first response."""
    generator: int
    row_id: int
    """First row of the group."""


@dataclass(frozen=True, kw_only=True)
class SamePrompt:
    """Result of a search."""

    groups: tuple[PromptGroup, ...]
    """Groups by ascending version."""
    searched: int
    """Number of parts read so far, including unreadable ones."""
    parts: int
    """Number of parts in all streams."""


class _Groups(NamedTuple):
    """The groups of a part; an unreadable part has none."""

    prompts: npt.NDArray[np.int64]
    row_ids: npt.NDArray[np.int64]
    versions: npt.NDArray[np.int64]


_NONE = np.empty(0, np.int64)


class PromptIndex:
    """Caches prompt hashes of a run's parts, 24 bytes per group. Not thread-safe."""

    def __init__(self, parts: PartReader) -> None:
        self._parts = parts
        self._cache: dict[tuple[int, int], _Groups] = {}

    def search(self, source: str, prompt_id: str, streams: Sequence[StreamIndex]) -> SamePrompt:
        """Finds a prompt's groups in cached parts and the newest unread parts; `streams` are by generator."""
        records = [(generator, record) for generator, stream in enumerate(streams) for record in stream.records]
        new = [(g, record) for g, record in records if (g, record.part) not in self._cache]
        new.sort(key=lambda group: group[1].max_policy_version, reverse=True)
        read = 0
        for number, (generator, record) in enumerate(new[:MAX_PARTS]):
            if number and read + record.bytes > MAX_BYTES:
                break
            read += record.bytes
            table = self._parts.try_read(streams[generator], record, [])
            self._cache[generator, record.part] = _groups(record, table)
        prompt_hash = _hashed(source, prompt_id)
        matches = [
            PromptGroup(int(groups.versions[i]), generator, int(groups.row_ids[i]))
            for (generator, _), groups in self._cache.items()
            for i in np.flatnonzero(groups.prompts == prompt_hash)
        ]
        return SamePrompt(groups=tuple(sorted(matches)), searched=len(self._cache), parts=len(records))


def _groups(record: Record, table: pa.Table | None) -> _Groups:
    if table is None or table.num_rows == 0:
        return _Groups(_NONE, _NONE, _NONE)
    group_ids = table["group_id"].to_numpy()
    starts = np.flatnonzero(np.diff(group_ids, prepend=group_ids[0] - 1))
    sources, names = (table[name].take(pa.array(starts)).to_pylist() for name in ("source", "prompt_id"))
    return _Groups(
        prompts=np.array(list(map(_hashed, sources, names)), np.int64),
        row_ids=record.first_row_id + starts.astype(np.int64),
        versions=table["min_policy_version"].to_numpy()[starts],
    )


def _hashed(source: str, prompt_id: str) -> int:
    """Hashes the name of a prompt, which is unique in its source."""
    name = f"{source}/{prompt_id}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big", signed=True)
