"""Messages between sync_weights and the members of a push, through a TCPStore of torch.

    member: trainer rank r, generator g     the store, in sync_weights                       sync_weights
        ├── rank: offer: version, hashes ─────►│── by all trainer ranks? ────────────────────────►│
        ├── generator: request: held version ─►│── an older version? ────────────────────────────►│
        │                                      │◄── push number n: version, who is invited ───────┤
        ├── n/ready: its session ─────────────►│── all ready, or out of time ────────────────────►│
        │                                      │◄── n/go: who takes part, in what order ──────────┤
        │◄══════════ shards, from member to member (exchange.py, or vLLM's engines) ═════►        │
        ├── n/done: what went wrong ──────────►│── all done, or out of time ─────────────────────►│
        │                                      │◄── n/go: no member, it is over ──────────────────┤

A push consumes the requests of the generators that it invites. One that does not answer is not invited again until it
makes another request, as it does after every push and when it connects.
"""

import json
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from pydantic import TypeAdapter
from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from millrace.errors import InputError
from millrace.weights.base import Manifest, WeightsId
from millrace.weights.direct.layout import ShardLayout


def trainer_name(rank: int) -> str:
    """The member that is a rank of the trainer."""
    return f"trainer/{rank}"


def generator_name(generator: int) -> str:
    """The member that is a generator."""
    return f"generator/{generator}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """A version to transfer, and the members that should take part."""

    number: int
    """Counts the pushes of this sync_weights process, from 1."""
    manifest: Manifest
    layout: ShardLayout
    """The trainer's."""
    invited: tuple[str, ...]
    transport: str = "direct"
    """Live transports bring weights into the running engines of the generators, which serve calls (`live/calls.py`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A trainer rank's part of a version."""

    manifest: Manifest
    layout: ShardLayout
    hashes: Mapping[str, str]
    """The hash of the rank's part of each tensor."""
    transports: tuple[str, ...] = ("direct",)
    """Those that the rank can send by, best first: `direct`, or live ones."""


_PUSH, _OFFER = TypeAdapter(Push), TypeAdapter(Offer)


class PushRendezvous:
    """sync_weights' end. Listens at `host`, at a free port, and nowhere else.

    Raises InputError if this machine has no such address.
    """

    def __init__(self, host: str) -> None:
        try:
            # Otherwise TCPStore would listen at every address of the machine.
            listening = socket.create_server((host, 0))
        except OSError as error:
            raise InputError(
                f"{host}, where this machine can't listen",
                key="placement.train.network",
                expected="one of its addresses",
            ) from error
        port = listening.getsockname()[1]
        self.address = f"{host}:{port}"
        self.store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
        self._number = 0
        self._offers = 0
        for counter in ("offers", "pushes"):
            self.store.add(counter, 0)

    def close(self) -> None:
        """Stops listening, once nothing else holds the store."""
        # A TCPStore ends with its last reference; it has no close.
        if hasattr(self, "store"):
            del self.store

    def offers_changed(self) -> bool:
        """Whether a trainer rank has offered anything since the last call. Takes some 50 µs."""
        offers_before, self._offers = self._offers, self.store.add("offers", 0)
        return offers_before != self._offers

    def offer(self, rank: int) -> Offer | None:
        """The last offer of a trainer rank."""
        text = self._read(f"offer/{trainer_name(rank)}")
        return None if text is None else _OFFER.validate_json(text)

    def drop_offer(self, rank: int) -> None:
        """Asks a trainer rank to offer its version once more."""
        self.store.delete_key(f"offer/{trainer_name(rank)}")

    def request(self, generator: int) -> dict[str, Any] | None:
        """The request of a generator: `{"held": version}`, None inside if it holds none; None without a request."""
        text = self._read(f"request/{generator_name(generator)}")
        return None if text is None else json.loads(text)

    def drop_request(self, generator: int) -> None:
        """Forgets the request of a generator."""
        self.store.delete_key(f"request/{generator_name(generator)}")

    def announce(self, manifest: Manifest, layout: ShardLayout, invited: Iterable[str], transport: str) -> Push:
        """Announces a new push to all members."""
        self._number += 1
        push = Push(number=self._number, manifest=manifest, layout=layout, invited=tuple(invited), transport=transport)
        for member in push.invited:
            self.store.delete_key(f"request/{member}")
        self.store.set("push", _PUSH.dump_json(push).decode())
        self.store.add("pushes", 1)
        return push

    def answers(self, name: str, push: Push, members: Iterable[str], seconds: float) -> dict[str, Any]:
        """The answers (`ready` or `done`) of the members that give one in this time; returns once all have."""
        keys = {member: f"{push.number}/{name}/{member}" for member in members}
        _wait(self.store, list(keys.values()), seconds)
        return {m: json.loads(self.store.get(key)) for m, key in keys.items() if self.store.check([key])}

    def go(self, push: Push, members: Mapping[str, str]) -> None:
        """Names the members that take part, in the order of their ranks, and their sessions."""
        self.store.set(f"{push.number}/go", json.dumps(members))

    def finish(self, push: Push) -> None:
        """Ends this push: a member that wakes up now stays out of it."""
        self.go(push, {})
        for key in self.store.list_keys():
            if key.startswith(f"{push.number - 1}/"):
                self.store.delete_key(key)

    def _read(self, key: str) -> bytes | None:
        return self.store.get(key) if self.store.check([key]) else None


class RendezvousClient:
    """A member's end.

    Raises OSError or DistError if nothing listens at the address. Every method raises DistNetworkError once
    sync_weights is gone; while its process is frozen, they wait for it.
    """

    def __init__(self, address: str, member: str, seconds: float) -> None:
        self.address = address
        host, _, port = address.rpartition(":")
        # TCPStore would retry a refused connection. This also shows by which of this machine's addresses the other
        # is reached.
        with socket.create_connection((host, int(port)), timeout=seconds) as probe:
            self.host: str = probe.getsockname()[0]
        self.store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=seconds))
        self._member = member
        self.seen = max(0, self.store.add("pushes", 0) - 1)
        """Number of the newest push that this member knows of."""

    def offer(self, offer: Offer) -> None:
        """Offers this trainer rank's part of a version."""
        self.store.set(f"offer/{self._member}", _OFFER.dump_json(offer).decode())
        self.store.add("offers", 1)

    def is_offered(self) -> bool:
        """Whether sync_weights still has this rank's offer. Takes some 50 µs."""
        offered: bool = self.store.check([f"offer/{self._member}"])
        return offered

    def request(self, held: WeightsId | None) -> None:
        """Asks for a version newer than the one that this generator holds."""
        self.store.set(f"request/{self._member}", json.dumps({"held": None if held is None else asdict(held)}))

    def next_push(self) -> Push | None:
        """The newest push, once, if this member is invited or not. Takes some 50 µs when there is none."""
        if self.store.add("pushes", 0) == self.seen:
            return None
        push = _PUSH.validate_json(self.store.get("push"))
        self.seen = push.number
        return push

    def ready(self, push: Push, session: str, seconds: float) -> dict[str, str]:
        """Answers with this member's session, empty if it can't take part, and waits this long for the others.

        Returns those that take part, with their sessions; none if the push is called off, over, or out of time.
        """
        self.set(push, f"ready/{self._member}", session)
        members: dict[str, str] | None = self.get(push, "go", seconds)
        return members or {}

    def again(self, seconds: float) -> "RendezvousClient":
        """Another connection, for another thread. Raises DistNetworkError if sync_weights is gone."""
        try:
            return RendezvousClient(self.address, self._member, seconds)
        except OSError as error:
            raise DistNetworkError(str(error)) from error

    def set(self, push: Push, key: str, value: Any) -> None:
        """Publishes a JSON value to the other members of a push."""
        self.store.set(f"{push.number}/{key}", json.dumps(value))

    def get(self, push: Push, key: str, seconds: float = 0.0) -> Any:
        """Waits for such a value; None without one in this time."""
        name = f"{push.number}/{key}"
        there = _wait(self.store, [name], seconds) if seconds > 0 else self.store.check([name])
        return json.loads(self.store.get(name)) if there else None

    def done(self, push: Push, error: str = "", *, damage: str = "") -> None:
        """Answers that its part is done, or what went wrong; `damage`: the received tensors that don't match."""
        self.set(push, f"done/{self._member}", {"error": error, "damage": damage})


def _wait(store: Store, keys: list[str], seconds: float) -> bool:
    """Whether all keys are set within `seconds`, which must be more than 0: that would be no limit."""
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except DistNetworkError:
        raise
    except DistStoreError:
        return False
    return True
