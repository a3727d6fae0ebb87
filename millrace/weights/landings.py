"""Two landings of a reader that receives in a thread of its own, so that it can always receive.

thread ─free─► landing ─fill, verify─► arrived ─take─► lent to the caller ─next take─► free
"""

import threading
from pathlib import Path

from millrace.errors import WeightsCorrupt
from millrace.weights.base import Weights, WeightsId
from millrace.weights.landing import Landing


class Landings:
    """Two files beside `path`: one may be lent while the other is filled. Its methods may be called by any thread."""

    def __init__(self, path: Path) -> None:
        self._landings = [Landing(path.with_name(f"{path.name}-{i}")) for i in (0, 1)]
        self._lock = threading.Lock()
        self._held: WeightsId | None = None
        self._lent: Landing | None = None
        self._arrived: tuple[Weights, Landing] | None = None
        self._refused: WeightsCorrupt | None = None

    def lacks(self, wanted: WeightsId) -> bool:
        """Whether these are newer than what the caller has and what waits for it here."""
        with self._lock:
            return wanted.newer_than(self._held) and (self._arrived is None or wanted.newer_than(self._arrived[0].id))

    def free(self) -> Landing:
        """One that nobody looks at; with none left, that of the older version that nobody took."""
        with self._lock:
            untaken = None if self._arrived is None else self._arrived[1]
            for landing in self._landings:
                if landing is not self._lent and landing is not untaken:
                    return landing
            self._arrived = None
            assert untaken is not None
            return untaken

    def arrive(self, weights: Weights, landing: Landing) -> None:
        """These lie in this landing, whole and verified."""
        with self._lock:
            self._arrived, self._refused = (weights, landing), None

    def refuse(self, error: WeightsCorrupt) -> None:
        """What arrived is damaged: the next `take` says so, unless there is something newer to take by then."""
        with self._lock:
            self._refused = error

    def take(self, newer_than: WeightsId | None) -> Weights | None:
        """The newest that arrived, if newer; ends the loan of what was taken before. Raises what was refused."""
        with self._lock:
            self._held, self._lent = newer_than, None
            arrived, self._arrived = self._arrived, None
            refused, self._refused = self._refused, None
            if arrived is not None and arrived[0].id.newer_than(newer_than):
                weights, self._lent = arrived
                self._held = weights.id
                return weights
            if refused is not None:
                raise refused
            return None

    def close(self) -> None:
        """Removes the files; what was lent stays usable."""
        for landing in self._landings:
            landing.close()
