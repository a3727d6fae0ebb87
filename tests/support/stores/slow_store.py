"""A store that is far away: every get takes its time, and is counted."""

import threading
import time

from support.stores.dict_store import DictStore


class SlowStore(DictStore):
    """Answers each get after `latency` seconds; `gets` has the paths, `most_at_once` the most concurrent gets."""

    def __init__(self, objects: dict[str, bytes] | None = None, *, latency: float = 0.0) -> None:
        super().__init__(objects)
        self.latency = latency
        self.gets: list[str] = []
        self.most_at_once = 0
        self.failing: dict[str, OSError] = {}
        """Error by path: raised, once, instead of an answer."""
        self._counting = threading.Lock()
        self._under_way = 0

    def get(self, path: str, start: int = 0, length: int | None = None) -> memoryview:
        with self._counting:
            self.gets.append(path)
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
            failure = self.failing.pop(path, None)
        try:
            time.sleep(self.latency)
            if failure is not None:
                raise failure
            return super().get(path, start, length)
        finally:
            with self._counting:
                self._under_way -= 1
