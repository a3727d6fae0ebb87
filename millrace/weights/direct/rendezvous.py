"""Messages between sync_weights and the members of a push, through a TCPStore of torch.

    member: trainer rank r, generator g     the store, in sync_weights                       sync_weights
        ├── token; the trainer's layout ──────►│                                                  │
        ├── offered: version, sums ───────────►│── by all trainer ranks? ────────────────────────►│
        │                                      │◄── push: number n, version, who is asked ────────┤
        ├── ready/n: the version it holds ────►│── all ready, or out of time ────────────────────►│
        │                                      │◄── go/n: who takes part, in what order ──────────┤
        │◄══════════ shards, from member to member (exchange.py) ════════════════════════►        │
        ├── done/n: what went wrong ──────────►│── all done, or out of time ─────────────────────►│
        │                                      │◄── go/n: nobody any more ────────────────────────┤

There is no standing membership. A member that does not answer in time is not asked again until it joins with another
token. It does that by itself: when it connects, and whenever it finds that a push went on without it.
"""

import json
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from millrace.errors import InputError
from millrace.weights.base import Manifest, WeightsId
from millrace.weights.direct.layout import ShardLayout

PATIENCE = 0.25
"""Share of the deadline for any one thing that another process has to do."""
_KEPT_PUSHES = 2
"""What these last pushes left in the store stays, for members that still wait for it."""


def trainer_name(rank: int) -> str:
    """The member that is a rank of the trainer."""
    return f"trainer/{rank}"


def generator_name(generator: int) -> str:
    """The member that is a generator."""
    return f"generator/{generator}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """Which version is to travel, and who should take part."""

    number: int
    """Counts the pushes of this sync_weights process, from 1."""
    manifest: Manifest
    asked: tuple[str, ...]
    """Members."""

    @property
    def id(self) -> WeightsId:
        """Which version."""
        return self.manifest.id


@dataclass(frozen=True, kw_only=True, slots=True)
class Go:
    """The members that take part in a push."""

    group: str = ""
    """Name of the process group; the same name as before means that the group is still good."""
    members: tuple[str, ...] = ()
    """In the order of their ranks: the trainer's, then the generators'. Empty: the push is called off, or over."""


class Rendezvous:
    """sync_weights' end. Listens at `host`, at a free port, and nowhere else.

    Raises InputError if this machine has no such address.
    """

    def __init__(self, host: str) -> None:
        try:
            # TCPStore by itself would listen at every address of the machine.
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
        for counter in ("offers", "pushes", "resends"):
            self.store.add(counter, 0)

    def close(self) -> None:
        """Stops listening, once nothing else holds the store."""
        # A TCPStore ends with its last reference; it has no close of its own.
        if hasattr(self, "store"):
            del self.store

    def token(self, member: str) -> str | None:
        """The token with which a member joined last; None if it never did."""
        return self._read(f"join/{member}")

    def layout(self) -> ShardLayout:
        """The trainer's. Its rank 0 must have joined."""
        return ShardLayout.from_json(json.loads(self.store.get("layout")))

    def offers_changed(self) -> bool:
        """Whether a trainer rank has offered anything since the last call. Takes some 50 µs."""
        before, self._offers = self._offers, self.store.add("offers", 0)
        return before != self._offers

    def offered(self, member: str) -> dict[str, Any] | None:
        """The last offer of a trainer rank; see `RendezvousClient.offer`."""
        text = self._read(f"offered/{member}")
        return None if text is None else json.loads(text)

    def request_resend(self) -> int:
        """Asks the trainer to offer its version once more. Returns how often that was asked for."""
        requests: int = self.store.add("resends", 1)
        return requests

    def announce(self, manifest: Manifest, asked: Iterable[str]) -> Push:
        """Tells all members of a new push."""
        self._number += 1
        push = Push(number=self._number, manifest=manifest, asked=tuple(asked))
        values = {"number": push.number, "manifest": manifest.to_json(), "asked": push.asked}
        self.store.set("push", json.dumps(values))
        self.store.add("pushes", 1)
        return push

    def ready(self, push: Push, seconds: float) -> dict[str, dict[str, Any]]:
        """The answers of the members that give one within this time; returns once all have."""
        return self._answers("ready", push, push.asked, seconds)

    def go(self, push: Push, go: Go) -> None:
        """Tells who takes part, and so the others that they do not."""
        self.store.set(f"go/{push.number}", json.dumps(asdict(go)))

    def done(self, push: Push, members: Iterable[str], seconds: float) -> dict[str, dict[str, Any]]:
        """The answers of the members that are done within this time."""
        return self._answers("done", push, members, seconds)

    def finish(self, push: Push) -> None:
        """Ends this push: a member that wakes up now stays out of it."""
        self.go(push, Go())
        self.store.delete_key(f"go/{push.number - _KEPT_PUSHES}")
        for member in push.asked:
            for name in ("ready", "done"):
                self.store.delete_key(f"{name}/{push.number}/{member}")

    def _read(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None

    def _answers(self, name: str, push: Push, members: Iterable[str], seconds: float) -> dict[str, dict[str, Any]]:
        keys = {member: f"{name}/{push.number}/{member}" for member in members}
        _wait(self.store, list(keys.values()), seconds)
        return {m: json.loads(self.store.get(key)) for m, key in keys.items() if self.store.check([key])}


class RendezvousClient:
    """A member's end. `layout`: the trainer's, which its rank 0 brings.

    Raises OSError or DistError if nothing listens at the address. Every method raises DistNetworkError once
    sync_weights is gone; while its process is frozen, they wait for it.
    """

    def __init__(self, address: str, member: str, seconds: float, layout: ShardLayout | None = None) -> None:
        host, _, port = address.rpartition(":")
        # Here a refusal comes at once, where TCPStore would try again and again; and it tells by which of this
        # machine's addresses the other is reached.
        with socket.create_connection((host, int(port)), timeout=seconds) as probe:
            self.host: str = probe.getsockname()[0]
        self.store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=seconds))
        self._member = member
        self._seen = max(0, self.store.add("pushes", 0) - 1)
        if layout is not None:
            self.store.set("layout", json.dumps(layout.to_json()))
        self.join()

    def join(self) -> None:
        """Asks to be asked (again)."""
        self._token = uuid4().hex
        self.store.set(f"join/{self._member}", self._token)

    def offer(self, manifest: Manifest, sums: Mapping[str, int], resends: int) -> None:
        """Says that this trainer rank holds its part of a version: the sum of each of its boxes, by tensor.

        `resends`: how often a version had been asked for once more when the rank took it.
        """
        values = {"manifest": manifest.to_json(), "sums": dict(sums), "resends": resends}
        self.store.set(f"offered/{self._member}", json.dumps(values))
        self.store.add("offers", 1)

    def resends(self) -> int:
        """How often sync_weights has asked for a version once more. Takes some 50 µs."""
        requests: int = self.store.add("resends", 0)
        return requests

    def layout(self) -> ShardLayout:
        """The trainer's."""
        return ShardLayout.from_json(json.loads(self.store.get("layout")))

    def next_push(self) -> Push | None:
        """The newest push, once, if this member is asked or not. Takes some 50 µs when there is none."""
        if self.store.add("pushes", 0) == self._seen:
            return None
        values = json.loads(self.store.get("push"))
        self._seen = values["number"]
        manifest = Manifest.from_json(values["manifest"])
        return Push(number=self._seen, manifest=manifest, asked=tuple(values["asked"]))

    def ready(self, push: Push, held: WeightsId | None, seconds: float) -> Go | None:
        """Answers that it is ready and waits this long for the others; None if the push goes on without it.

        `held`: the version that this trainer rank holds; None for a generator.
        """
        values = {"token": self._token, "held": None if held is None else asdict(held)}
        self.store.set(f"ready/{push.number}/{self._member}", json.dumps(values))
        key = f"go/{push.number}"
        if not _wait(self.store, [key], seconds):
            return None
        values = json.loads(self.store.get(key))
        go = Go(group=values["group"], members=tuple(values["members"]))
        return go if self._member in go.members else None

    def done(self, push: Push, wrong: str = "", *, damaged: bool = False) -> None:
        """Answers that its part is done, or what went wrong; `damaged`: what it received does not match."""
        self.store.set(f"done/{push.number}/{self._member}", json.dumps({"wrong": wrong, "damaged": damaged}))


def _wait(store: Store, keys: list[str], seconds: float) -> bool:
    """Whether all keys are set within `seconds`, which must be more than 0: that would be no limit."""
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except DistNetworkError:
        raise
    except DistStoreError:
        return False
    return True
