"""Where host 0 of a trainer is, as the other hosts find it in the run's store, and the secret they have to know."""

import json
from dataclasses import asdict, dataclass

from storage import layout
from storage.errors import NotInStore, StorageError
from storage.stores.base import Store


@dataclass(frozen=True, kw_only=True)
class LeaderAddress:
    """The launcher of host 0, as long as it lives."""

    attempt: int
    address: str
    port: int
    secret: str
    """In hexadecimal; another one for each launcher."""


def publish(store: Store, leader: LeaderAddress) -> None:
    """Replaces what a former launcher has published. Raises StorageError."""
    store.put(layout.TRAINER_HOSTS, json.dumps(asdict(leader)).encode())


def find(store: Store, attempt: int) -> LeaderAddress | None:
    """What host 0 of this attempt has published; None if there is nothing, or if the store can't be reached now."""
    try:
        leader = LeaderAddress(**json.loads(bytes(store.get(layout.TRAINER_HOSTS))))
    except (NotInStore, StorageError, OSError, ValueError):
        return None
    return leader if leader.attempt == attempt else None
