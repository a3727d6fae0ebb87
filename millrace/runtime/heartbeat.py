"""How processes on different hosts know of each other: by status records in the run's store.

    controller: publisher ──progress/controller-0──► monitor ───┐              its stages drain on command,
                                                                ├─ flow `stages` on another host   or when it is silent
    controller: monitor ◄──progress/place-<stage>-<n>─ publisher┘      the controller restarts them when they are silent

No clock is compared with another host's: a monitor measures with its own clock how long a counter has not changed.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from ipaddress import ip_address, ip_network
from typing import Any, Self

import psutil

from millrace.errors import InputError
from millrace.runtime.background import Background
from millrace.runtime.messages import STOPPED
from storage.errors import StorageError
from storage.progress import read_status, write_progress
from storage.stores.base import Store

HEARTBEAT_SECONDS = 2.0
SILENT_SECONDS = 40.0
"""A process without a heartbeat for this long counts as lost. If it still commits, its stream's fence refuses."""


class HeartbeatPublisher(Background):
    """Writes a status record every `HEARTBEAT_SECONDS` while its `with` block lasts, and at every `publish`.

    `owner_id` distinguishes this publisher from others that write, or wrote, under the same name. `draining` is called
    for each record. `values` are its other keys at the start; one of them is `doing`.
    """

    def __init__(
        self, store: Store, name: str, number: int, *, owner_id: str, draining: Callable[[], bool], **values: Any
    ) -> None:
        super().__init__(f"heartbeat {name}-{number}", join_seconds=None)
        self._store = store
        self._name = name
        self._number = number
        self._values: dict[str, Any] = {"of": owner_id, **values}
        self._draining = draining
        self._count = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self.publish()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        with contextlib.suppress(StorageError, OSError):
            self.publish(doing=STOPPED)

    def publish(self, **values: Any) -> None:
        """Adds values to the status record and writes it. Raises StorageError."""
        with self._lock:
            self._values |= values
            self._count += 1
            beat = {"beat": self._count, "t": time.time(), "draining": self._draining()}
            write_progress(self._store, self._name, self._number, {**self._values, **beat})

    def _run(self) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            # If the store is out of reach, the monitor sees silence, which is the right conclusion.
            with contextlib.suppress(StorageError, OSError):
                self.publish()


class HeartbeatMonitor:
    """Reads one status record, and measures for how long it has not changed."""

    def __init__(self, store: Store, name: str, number: int) -> None:
        self._store = store
        self._name = name
        self._number = number
        self._changed = time.monotonic()
        self.status: dict[str, Any] = {}
        """The record as it was last read; empty before the first."""

    @property
    def owner_id(self) -> str | None:
        """The `owner_id` of its publisher; None before the first record."""
        return self.status.get("of")

    @property
    def silent_seconds(self) -> float:
        """Seconds since the record was seen to change, as of the last look."""
        return time.monotonic() - self._changed

    def look(self) -> float:
        """Reads the record; returns `silent_seconds`. An unreachable store counts as silence."""
        with contextlib.suppress(StorageError, OSError):
            status = read_status(self._store, self._name, self._number)
            if status and any(status.get(key) != self.status.get(key) for key in ("of", "beat")):
                self._changed, self.status = time.monotonic(), status
        return self.silent_seconds


def interface_variables(network: str | None) -> dict[str, str]:
    """Returns variables that have gloo and NCCL use this host's interface in `network`; loopback if that is None.

    Those already set in this process are left out. Raises as `own_interface`.
    """
    interface = "lo" if network is None else own_interface(network)[0]
    # NCCL takes a name for a prefix, so that eth1 means eth10 too, unless it begins with an equals sign.
    variables = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {name: value for name, value in variables.items() if name not in os.environ}


def own_interface(network: str) -> tuple[str, str]:
    """Returns the name and address of this host's interface in `placement.train.network`, such as 10.0.0.0/24.

    Raises InputError if the host has none there.
    """
    addresses = [
        (name, address.address)
        for name, of_interface in psutil.net_if_addrs().items()
        for address in of_interface
        if address.family == socket.AF_INET
    ]
    for name, address in addresses:
        if ip_address(address) in ip_network(network):
            return name, address
    shown = ", ".join(sorted(address for _, address in addresses)) or "none"
    raise InputError(
        f"{network}, and host {socket.gethostname()} has no address in it, only {shown}",
        key="placement.train.network",
        expected="a network that this host is in",
    )
