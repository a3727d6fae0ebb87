"""A generator's end of a transport with a fallback: the run's store.

transport ──newer?──► returned
    │ no
    └─► store, at most every look_seconds ──newer?──► returned: sync_weights stored it because a generator was late
"""

import time
from collections.abc import Callable

from millrace.errors import WeightsCorrupt
from millrace.weights.base import Weights, WeightsId, WeightsReceiver


class FallbackReceiver(WeightsReceiver):
    """Polls `primary`, named `route`, then `store_receiver`.

    `store_receiver` is None if the primary is the store itself. A transport that delivered a damaged version is not
    polled again for `look_seconds`, and the same damage is raised at most once. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        primary: WeightsReceiver,
        store_receiver: WeightsReceiver | None,
        *,
        route: str,
        look_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.last_route = route
        """Route of the last version: `route`, or `store`."""
        self._primary = primary
        self._look_seconds = look_seconds
        self._clock = clock
        self._receivers = {route: primary}
        self._next_looks = {route: clock()}
        if store_receiver is not None:
            self._receivers["store"] = store_receiver
            # After a start, wait for the primary first: the store may hold a version of an earlier attempt.
            self._next_looks["store"] = clock() + look_seconds
        # Messages of damage, which name the version and the tensors.
        self._raised: set[str] = set()

    def poll(self, newer_than: WeightsId | None) -> Weights | None:
        """Returns the newest weights of either route, whole and verified, if they are newer; None otherwise.

        Raises WeightsCorrupt if a route delivered damaged weights and neither has sound ones. Later polls return None
        until sound weights or other damage arrive.
        """
        damage: list[WeightsCorrupt] = []
        for route, receiver in self._receivers.items():
            now = self._clock()
            if now < self._next_looks[route]:
                continue
            if receiver is not self._primary:
                self._next_looks[route] = now + self._look_seconds
            try:
                weights = receiver.poll(newer_than)
            except WeightsCorrupt as error:
                # The damage stays until the next push, and finding it takes a hash of every byte.
                self._next_looks[route] = now + self._look_seconds
                damage.append(error)
                continue
            if weights is not None:
                self.last_route = route
                return weights
        for damaged in damage:
            if str(damaged) not in self._raised:
                self._raised.add(str(damaged))
                raise damaged
        return None

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()
