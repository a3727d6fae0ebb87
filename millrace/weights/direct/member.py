"""A member of pushes: a thread that finds sync_weights, again whenever it loses it, and takes part.

    find ─► idle ─► push? ─► ready ─► go ─► process group ─► transfer ─► done
      ▲      ▲                └── any error, or left out of the push ─────────┴─► idle
      └──────┴─ sync_weights is gone

The subclasses are a rank of the trainer and a generator.
"""

import atexit
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from millrace.weights.direct.exchange import PushGroup
from millrace.weights.direct.rendezvous import Push, RendezvousClient
from storage.failpoints import failpoint

PATIENCE = 0.25
"""Share of the deadline for any one thing that another process has to do."""
_LOOK_SECONDS = 0.05  # between two tries to find sync_weights
_POLL_SECONDS = 0.01  # between two looks for a push
_STOP_SECONDS = 5.0  # for the thread to end


class Member(ABC):
    """The loop above. `find` returns where sync_weights listens (`host:port`), None if not yet known.

    No push takes longer than `deadline_seconds`.
    """

    def __init__(self, name: str, find: Callable[[], str | None], *, deadline_seconds: float) -> None:
        self.name = name
        self.wire_bytes = 0
        """Sent by this member so far."""
        self._find = find
        self._deadline_seconds = deadline_seconds
        self._patience = deadline_seconds * PATIENCE
        self.session = uuid4().hex
        """Its connections to other members. A new one after an error, which they find out by it."""
        self._group: PushGroup | None = None
        self._error: Exception | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Call it once, when all attributes are set."""
        self._thread.start()
        # A thread that comes back from torch while the interpreter ends would abort the process.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the thread. May be called again."""
        self._closed.set()
        # While sync_weights is frozen, the thread can't end.
        self._thread.join(timeout=_STOP_SECONDS)
        atexit.unregister(self.stop)

    def raise_error(self) -> None:
        """Raises the error that ended the thread, if any."""
        if self._error is not None:
            raise self._error

    @abstractmethod
    def idle(self, client: RendezvousClient) -> None:
        """Called repeatedly between pushes."""

    @abstractmethod
    def take_part(self, client: RendezvousClient, push: Push) -> None:
        """Takes part in a push for which this member is invited."""

    def exchange(
        self, client: RendezvousClient, push: Push, is_able: bool, transfer: Callable[[Mapping[str, str], float], int]
    ) -> str | None:
        """Has `transfer` do this member's part with all members and their sessions, by the time that it gets.

        `transfer` returns the bytes sent. Returns what went wrong, empty if nothing, or None if this member does not
        take part.
        """
        until = time.monotonic() + self._deadline_seconds
        failpoint("direct.ready")
        members = client.ready(push, self.session if is_able else "", 2 * self._patience)
        if self.name not in members:
            return None
        try:
            self.wire_bytes += transfer(members, until)
        except RuntimeError as error:
            if isinstance(error, dist.DistNetworkError):
                raise
            self._group, self.session = None, uuid4().hex
            print(f"{push.transport}: {self.name}: {error}", file=sys.stderr)
            return str(error)
        return ""

    def join_group(self, client: RendezvousClient, push: Push, members: Mapping[str, str]) -> PushGroup:
        """Joins the group of a push by `direct`. Raises RuntimeError if the others do not come."""
        # Drop the last push's group first: its members may be waiting for this process there.
        self._group = None
        self._group = PushGroup(
            PrefixStore(f"{push.number}/group", client.store),
            client.host,
            # Only live transports take tensors from a GPU.
            torch.device("cpu"),
            rank=list(members).index(self.name),
            size=len(members),
            seconds=self._patience,
        )
        return self._group

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._follow()
                self._closed.wait(_LOOK_SECONDS)
        except Exception as error:  # noqa: BLE001 — `raise_error` raises it
            self._error = error

    def _follow(self) -> None:
        """Takes part in the pushes of sync_weights, if it can be found, until it is gone."""
        address = self._find()
        if address is None:
            return
        try:
            client = RendezvousClient(address, self.name, self._patience)
        except (OSError, dist.DistError):
            return  # A predecessor's address. The successor will publish its own.
        try:
            while not self._closed.is_set():
                push = client.next_push()
                if push is None:
                    self.idle(client)
                    self._closed.wait(_POLL_SECONDS)
                elif self.name in push.invited:
                    self.take_part(client, push)
        except dist.DistError:
            pass  # sync_weights is gone; versions that arrived stay valid.
        finally:
            self._group = None
