"""A generator's end of a transport that can fail: what does not come by it comes through the run's store.

transport ──newer?──► taken
    │ no
    └─► store, at most every look_seconds ──newer?──► taken: sync_weights stored it, because somebody was late
"""

import time
from collections.abc import Callable

from millrace.errors import WeightsCorrupt
from millrace.weights.base import Weights, WeightsId, WeightsReader

STORE = "store"
"""The route of what came through the store."""


class FallbackReader(WeightsReader):
    """Takes from `primary`, by the name of `route`, and from `store_reader` what did not come by that.

    None for `store_reader`: the primary is the store, and there is nothing to fall back to. A way by which a damaged
    version came is not asked again for `look_seconds`, and the same damage is raised once at most. `clock` tells
    monotonic seconds.
    """

    def __init__(
        self,
        primary: WeightsReader,
        store_reader: WeightsReader | None,
        *,
        route: str,
        look_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.last_route = route
        """By which way the version taken last came: `route`, or `store`."""
        self._look_seconds = look_seconds
        self._clock = clock
        self._ways = [_Way(route, primary, next_look=clock(), look_seconds=0.0)]
        if store_reader is not None:
            # Who has just started waits for the primary first: the store may hold what an earlier attempt left.
            store_looks = clock() + look_seconds
            self._ways.append(_Way(STORE, store_reader, next_look=store_looks, look_seconds=look_seconds))
        # By its sentence, which names the version and the tensors.
        self._raised: set[str] = set()

    def take(self, newer_than: WeightsId | None) -> Weights | None:
        """The newest weights that came by either way if they are newer, whole and verified; else None.

        Raises WeightsCorrupt when what came is damaged and neither way has anything better. Later takes then return
        None, until there is something better or other damage.
        """
        damage: list[WeightsCorrupt] = []
        for way in self._ways:
            now = self._clock()
            if now < way.next_look:
                continue
            way.next_look = now + way.look_seconds
            try:
                weights = way.reader.take(newer_than)
            except WeightsCorrupt as error:
                # What lies there stays damaged until the next push, and finding out takes a hash of all of it.
                way.next_look = now + self._look_seconds
                damage.append(error)
                continue
            if weights is not None:
                self.last_route = way.route
                return weights
        for found in damage:
            if str(found) not in self._raised:
                self._raised.add(str(found))
                raise found
        return None

    def close(self) -> None:
        """Lets go of both."""
        for way in self._ways:
            way.reader.close()


class _Way:
    """One of the two, and when it may be asked again: monotonic seconds."""

    def __init__(self, route: str, reader: WeightsReader, *, next_look: float, look_seconds: float) -> None:
        self.route = route
        self.reader = reader
        self.next_look = next_look
        self.look_seconds = look_seconds
