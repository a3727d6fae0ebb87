"""torchrun for a trainer over several hosts: one launcher per host, which starts the host's ranks and ends as they did.

    supervisor ─► launcher of host 0 ◄── status records ──► launcher of host 1, 2, … ◄─ supervisor there
                     └─► rank 0, 1, …  ◄════════════════════► ranks …                   ranks meet in torch's store

    SIGTERM at host 0 ─► rank 0 drains, and its last command ends all ranks
    SIGTERM elsewhere, or a host comes late ─► host 0 drains rank 0
    a host is lost, or a rank fails ─► every launcher ends its ranks and itself
    host 0 stays away ─► YIELDED: this host is free for the job of host 0

    python -m millrace.runtime.host_launcher HOSTS-AS-JSON ARGUMENTS OF PYTHON …

The launchers know of each other by `progress/trainer-host-<n>.json` in the run's store. A launcher starts ranks once;
then the task of each host starts its launcher again, and the trainer continues from its newest checkpoint.

    host n: joins       id of the launcher of host 0 that this one joins
    host 0: rendezvous  where the ranks meet, and the launchers that take part
            code        exit code of the ranks of host 0
"""

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from ipaddress import ip_address

from millrace.errors import DRAINED, YIELDED, PlaceYielded
from millrace.runtime.arguments import Hosts
from millrace.runtime.heartbeat import SILENT_SECONDS, HeartbeatMonitor, HeartbeatPublisher, own_interface
from millrace.runtime.launcher import RankProcesses, Rendezvous, end_as, prepare, rendezvous_store
from millrace.runtime.messages import STOPPED, HeartbeatSender, send, watch_lifeline
from storage.errors import StorageError
from storage.stores.factory import open_store

_RECORD = "trainer-host"
_LOOK_SECONDS = 1.0
_GRACE_SECONDS = 3.0
"""Time for ranks to end after another host was lost: their exit code says more than a kill."""
_YIELD_SECONDS = 90.0
"""Longer than the controller takes to miss host 0 and to ask the pool to run its job elsewhere."""


def main(hosts: Hosts, arguments: Sequence[str]) -> int:
    """Runs `python ARGUMENTS` as the ranks of this host, to their end. Returns the stage's exit code."""
    prepare()
    launcher = HostLauncher(hosts, own_interface(hosts.network)[1], arguments)
    with launcher.publisher:
        return launcher.follow() if hosts.host else launcher.lead()


class HostLauncher:
    """The launcher of host `hosts.host`, which is reached at `address`."""

    def __init__(self, hosts: Hosts, address: str, arguments: Sequence[str]) -> None:
        self._hosts = hosts
        self._address = address
        self._arguments = arguments
        self._id = uuid.uuid4().hex
        self._draining = False
        self._store = open_store(hosts.run_url)
        self._heartbeats = HeartbeatSender(send)
        self._on_same_machine: set[int] = set()
        self.publisher = HeartbeatPublisher(
            self._store,
            _RECORD,
            hosts.host,
            owner_id=self._id,
            draining=lambda: self._draining,
            doing=f"at {address}",
            attempt=hosts.attempt,
            address=address,
        )

    def lead(self) -> int:
        """Starts the ranks of all hosts, as host 0. Returns the exit code of those here."""
        monitors = {host: HeartbeatMonitor(self._store, _RECORD, host) for host in range(1, self._hosts.hosts)}
        members = self._wait_for_members(monitors)
        ids = {host: monitors[host].owner_id for host in members}
        store = rendezvous_store(self._address)
        launchers = [self._id, *map(str, ids.values())]
        rendezvous = Rendezvous(address=self._address, port=store.port, run_id=self._id, launchers=launchers)
        self.publisher.publish(rendezvous=asdict(rendezvous))
        ranks = RankProcesses(self._hosts.ranks, self._arguments, rendezvous, self._id)
        change = ""

        def check() -> str:
            """Drains rank 0 if the hosts change. Returns a sentence about a lost host."""
            nonlocal change
            present = self._present(monitors)
            lost = [host for host in members if _is_lost(monitors[host], ids[host])]
            if lost:
                return f"host {lost[0]} of the trainer, at {members[lost[0]]}, is lost: all ranks end"
            late = [str(host) for host in present if host not in members]
            leaving = [str(host) for host in members if monitors[host].status["draining"]]
            if (late or leaving) and not change and ranks.pids:
                change = f"host {', '.join(late)} has come" if late else f"host {', '.join(leaving)} has to leave"
                send(f"{change}: the trainer starts again after this step")
                ranks.drain()
            return ""

        code = self._run(ranks, check)
        code = 1 if code is None else code
        with suppress(StorageError, OSError):
            self.publisher.publish(code=code)
        return code

    def follow(self) -> int:
        """Starts the ranks here when host 0 does. Returns the stage's exit code."""
        watch_lifeline(lambda: os.kill(os.getpid(), signal.SIGTERM))
        leader = HeartbeatMonitor(self._store, _RECORD, 0)
        joined = None
        while self._id not in leader.status.get("rendezvous", {}).get("launchers", ()):
            if leader.look() > _YIELD_SECONDS:
                away = f"host 0 of the trainer has been away for {_YIELD_SECONDS:.0f} s: its job can run here"
                send(PlaceYielded(away))
                return YIELDED
            if leader.owner_id != joined and leader.status["attempt"] == self._hosts.attempt:
                joined = leader.owner_id
                self.publisher.publish(joins=joined)
            self._heartbeats.offer("waiting for the other hosts of the trainer", ready=False)
            time.sleep(_LOOK_SECONDS)
        rendezvous = Rendezvous(**leader.status["rendezvous"])

        def check() -> str:
            """Returns a sentence if host 0 is lost. Sends a heartbeat: if ranks hang here, rank 0 hangs too."""
            with suppress(BrokenPipeError):
                self._heartbeats.offer("training", ready=True)
            leader.look()
            return "host 0 of the trainer is lost: all ranks here end" if _is_lost(leader, joined) else ""

        code = self._run(RankProcesses(self._hosts.ranks, self._arguments, rendezvous, self._id, self._drain), check)
        if code:
            return code
        while True:
            # Rank 0 ended these ranks, or was lost; its launcher's record says whether for good.
            leader.look()
            leader_code = leader.status.get("code") if leader.owner_id == joined else DRAINED
            if leader_code == DRAINED or (code == 0 and leader_code):
                return DRAINED
            if code == leader_code == 0:
                return 0
            if _is_lost(leader, joined):
                return 1
            time.sleep(_LOOK_SECONDS)

    def _wait_for_members(self, monitors: dict[int, HeartbeatMonitor]) -> dict[int, str]:
        """The addresses of the hosts to start with, by number, without this one."""
        hosts, began = self._hosts, time.monotonic()
        while True:
            members = self._present(monitors)
            count = 1 + len(members)
            is_late = time.monotonic() - began >= hosts.join_seconds
            if count == hosts.hosts or (count >= hosts.min_hosts and is_late):
                break
            missing = hosts.hosts - count
            self._heartbeats.offer(f"waiting for {missing} of {hosts.hosts} hosts of the trainer", ready=False)
            time.sleep(_LOOK_SECONDS)
        if count < hosts.hosts:
            absent = ", ".join(str(host) for host in monitors if host not in members)
            present = f"{count} of {hosts.hosts} hosts, with {count * hosts.ranks} of {hosts.hosts * hosts.ranks} ranks"
            send(f"the trainer starts on {present}, because host {absent} has not come")
        else:
            send(f"the trainer starts on {count} hosts: {', '.join([self._address, *members.values()])}")
        return members

    def _present(self, monitors: dict[int, HeartbeatMonitor]) -> dict[int, str]:
        """The addresses of the hosts that join this launcher, by number. A machine counts once."""
        addresses = {0: self._address}
        for host, monitor in monitors.items():
            if monitor.look() > SILENT_SECONDS or monitor.status.get("joins") != self._id:
                continue
            if monitor.status["doing"] == STOPPED:
                continue
            address = str(monitor.status["address"])
            # On loopback all hosts are one machine, for trying things out.
            if address in addresses.values() and not ip_address(address).is_loopback:
                if host not in self._on_same_machine:
                    self._on_same_machine.add(host)
                    send(
                        f"host {host} of the trainer is left out: another one is on its machine, at {address}; "
                        "expected one job per host: make host LIMIT=1"
                    )
                continue
            addresses[host] = address
        return {host: address for host, address in addresses.items() if host}

    def _run(self, ranks: RankProcesses, check: Callable[[], str]) -> int | None:
        """Runs the ranks here to their end. Returns their exit code.

        If `check` returns a sentence about a lost host and the ranks do not end, kills them and returns None.
        """
        ended, was_lost = threading.Event(), threading.Event()

        def watch() -> None:
            while not ended.wait(_LOOK_SECONDS):
                if (lost := check()) and not ended.wait(_GRACE_SECONDS):
                    was_lost.set()
                    print(lost, file=sys.stderr, flush=True)
                    with suppress(BrokenPipeError):
                        send(lost)
                    ranks.show_stacks()
                    ranks.kill()
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            code = ranks.run()
        finally:
            ended.set()
            watcher.join()
        return None if was_lost.is_set() else code

    def _drain(self) -> None:
        # Host 0 reads it in the next heartbeat, and drains rank 0.
        self._draining = True


def _is_lost(monitor: HeartbeatMonitor, owner_id: str | None) -> bool:
    """Whether the launcher `owner_id` was silent, had ended, or had been replaced at the last look."""
    is_silent = monitor.silent_seconds > SILENT_SECONDS
    return is_silent or monitor.owner_id != owner_id or monitor.status["doing"] == STOPPED


if __name__ == "__main__":
    end_as(main(Hosts.from_json(sys.argv[1]), sys.argv[2:]))
