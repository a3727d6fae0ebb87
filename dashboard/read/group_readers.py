"""Readers of groups and tokens per run, shared by the pages."""

import threading

from dashboard.read.groups import GroupReader
from dashboard.read.model import RunData
from dashboard.read.tokens import TokenTexts, read_tokens
from storage.stores.factory import open_store

_KEPT = 4
"""Number of cached readers; each keeps a few parts in memory."""


class GroupReaders:
    """Caches the readers of the most recently used runs; thread-safe."""

    def __init__(self) -> None:
        self._readers: dict[tuple[str, float], tuple[GroupReader, TokenTexts]] = {}
        self._lock = threading.Lock()

    def of(self, run: RunData) -> tuple[GroupReader, TokenTexts]:
        """Returns the readers of a run's groups and tokens."""
        # The key includes the start time, because another run may replace a deleted one at its URL.
        key = run.info.url, run.info.attempts[0].t_started
        with self._lock:
            readers = self._readers.pop(key, None)
            # The tokenizer of a run that makes its start model is stored after the warm start.
            if readers is None or readers[1].note:
                store, config = open_store(run.info.url), run.info.config
                groups = GroupReader(store, config) if readers is None else readers[0]
                readers = groups, read_tokens(store, config)
            self._readers[key] = readers
            while len(self._readers) > _KEPT:
                self._readers.pop(next(iter(self._readers)))
            return readers
