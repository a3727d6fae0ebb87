"""Who takes part in a push: what sync_weights and the generators tell each other, through a TCPStore of torch.

    generator g              the store, in sync_weights               sync_weights
        │── join/g: a token ──────────►│                                    │
        │                              │◄── push: number n, manifest, asked ┤
        ├── ready/n/g ────────────────►│── all ready, or out of time ──────►│
        │                              │◄── go/n: group, ranks ─────────────┤
        │◄═════════ the tensors, through that group (process_group.py) ═════╡
        ├── done/n/g ─────────────────►│── all done, or out of time ───────►│
        │                              │◄── over: n ────────────────────────┤

There is no standing membership. A generator that does not answer in time is not asked again until it joins with another
token. It does that by itself: when it connects, and whenever it finds that a push went on without it.
"""

import json
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from uuid import uuid4

from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from millrace.errors import InputError
from millrace.weights.base import Manifest
from millrace.weights.shared_tensors import TensorShape, shapes_from_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """What sync_weights wants to broadcast, and to whom."""

    number: int
    """Counts the pushes of this sync_weights process, from 1."""
    manifest: Manifest
    shapes: tuple[TensorShape, ...]
    """In the order in which the tensors are sent."""
    asked: tuple[int, ...]
    """The generators that should take part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Go:
    """Who does take part in a push."""

    group: str
    """Name of the process group; the same name as before means that the group is still good."""
    ranks: Mapping[int, int]
    """Generator → its rank in the group; sync_weights has rank 0."""


class Rendezvous:
    """sync_weights' end. Listens at `host`, at a free port, and nowhere else.

    Raises InputError if this machine has no such address.
    """

    def __init__(self, host: str) -> None:
        try:
            # TCPStore by itself would listen at every address of the machine.
            listening = socket.create_server((host, 0))
        except OSError as error:
            raise InputError(f"weights.host: can't listen at {host}; expected an address of this machine") from error
        port = listening.getsockname()[1]
        self.address = f"{host}:{port}"
        self.store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
        self._number = 0
        self.store.set("over", "0")
        self.store.add("pushes", 0)

    def close(self) -> None:
        """Stops listening, once nothing else holds the store."""
        # A TCPStore ends with its last reference; it has no close of its own.
        if hasattr(self, "store"):
            del self.store

    def joined(self, generator: int) -> str | None:
        """The token with which a generator joined last; None if it never did."""
        key = f"join/{generator}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def announce(self, manifest: Manifest, shapes: tuple[TensorShape, ...], asked: Iterable[int]) -> Push:
        """Tells all generators of a new push."""
        self._number += 1
        push = Push(number=self._number, manifest=manifest, shapes=shapes, asked=tuple(asked))
        values = {"number": push.number, "manifest": manifest.to_json(), "shapes": shapes, "asked": push.asked}
        self.store.set("push", json.dumps(values))
        self.store.add("pushes", 1)
        return push

    def ready(self, push: Push, seconds: float) -> dict[int, str]:
        """The tokens of the generators that answer within this time; returns once all have."""
        return self._answers("ready", push, push.asked, seconds)

    def go(self, push: Push, go: Go) -> None:
        """Tells who takes part, and so the others that they do not."""
        self.store.set(f"go/{push.number}", json.dumps(asdict(go)))

    def done(self, push: Push, members: Iterable[int], seconds: float) -> dict[int, str]:
        """The answers of the members that are done within this time: empty, or what is wrong."""
        return self._answers("done", push, members, seconds)

    def over(self, push: Push) -> None:
        """Ends this push, however it went, and deletes its answers."""
        self.store.set("over", str(push.number))
        for generator in push.asked:
            self.store.delete_key(f"ready/{push.number}/{generator}")
            self.store.delete_key(f"done/{push.number}/{generator}")
        # The last one stays for generators that still wait for it.
        self.store.delete_key(f"go/{push.number - 1}")

    def _answers(self, name: str, push: Push, generators: Iterable[int], seconds: float) -> dict[int, str]:
        keys = {generator: f"{name}/{push.number}/{generator}" for generator in generators}
        _wait(self.store, list(keys.values()), seconds)
        return {g: self.store.get(key).decode() for g, key in keys.items() if self.store.check([key])}


class RendezvousClient:
    """A generator's end.

    Raises OSError or DistError if nothing listens at the address. Every method raises DistNetworkError once
    sync_weights is gone; while its process is frozen, they wait for it.
    """

    def __init__(self, address: str, generator: int, seconds: float) -> None:
        host, _, port = address.rpartition(":")
        # Here a refusal comes at once, where TCPStore would try again and again; and it tells by which of this
        # machine's addresses the other is reached.
        with socket.create_connection((host, int(port)), timeout=seconds) as probe:
            self.host: str = probe.getsockname()[0]
        self.store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=seconds))
        self._generator = generator
        self._seen = max(0, self.store.add("pushes", 0) - 1)
        self.join()

    def join(self) -> None:
        """Asks to be asked (again)."""
        self._token = uuid4().hex
        self.store.set(f"join/{self._generator}", self._token)

    def next_push(self) -> Push | None:
        """The newest push, once. Takes some 50 µs when there is none."""
        if self.store.add("pushes", 0) == self._seen:
            return None
        values = json.loads(self.store.get("push"))
        self._seen = values["number"]
        return Push(
            number=values["number"],
            manifest=Manifest.from_json(values["manifest"]),
            shapes=shapes_from_json(values["shapes"]),
            asked=tuple(values["asked"]),
        )

    def ready(self, push: Push, seconds: float) -> Go | None:
        """Answers that it is ready and waits this long for the others; None if the push goes on without it."""
        self.store.set(f"ready/{push.number}/{self._generator}", self._token)
        key = f"go/{push.number}"
        # Over already: this process was frozen in between, and the group is gone.
        if not _wait(self.store, [key], seconds) or int(self.store.get("over")) >= push.number:
            return None
        values = json.loads(self.store.get(key))
        go = Go(group=values["group"], ranks={int(g): rank for g, rank in values["ranks"].items()})
        return go if self._generator in go.ranks else None

    def done(self, push: Push, wrong: str = "") -> None:
        """Answers that the version arrived, or what is wrong with it."""
        self.store.set(f"done/{push.number}/{self._generator}", wrong)


def _wait(store: Store, keys: list[str], seconds: float) -> bool:
    """Whether all keys are set within `seconds`, which must be more than 0: that would be no limit."""
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except DistNetworkError:
        raise
    except DistStoreError:
        return False
    return True
