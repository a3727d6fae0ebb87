"""torchrun for a trainer over several hosts: one launcher per host, which starts the host's ranks and ends as they did.

    supervisor ─► launcher of host 0 ──go──► launcher of host 1, 2, … ◄─ supervisor there
                     └─► rank 0, 1, …  ◄══════► ranks …                  ranks meet in torch's store at host 0

    SIGTERM at host 0 ─► rank 0 drains, and its last command ends all ranks
    SIGTERM elsewhere, or a host comes late ─► host 0 has rank 0 drain; its task starts it again, and the others join it
    SIGUSR1 at host 0 ─► the ranks of all hosts write their stacks into their logs
    a host is lost, or a rank fails ─► every launcher ends its ranks and itself; their tasks start them again
    host 0 stays away ─► YIELDED: this host is free for the job of host 0

    python -m millrace.runtime.ranks.hosts HOSTS-AS-JSON ARGUMENTS OF PYTHON …

Messages to host 0: join, leave. From host 0: refused, go, stacks; when its ranks end: over, again. The launchers
stay connected, so that the loss of a host is noticed even while no rank waits for another.
"""

import os
import secrets
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from millrace.errors import InputError
from millrace.runtime.exit_codes import DRAINED, ERROR_PREFIX, USER_ERROR, YIELDED
from millrace.runtime.interfaces import own_interface
from millrace.runtime.messages import Heartbeat, HeartbeatSender, milestone_line, send
from millrace.runtime.ranks.launcher import (
    PERMANENT,
    Rendezvous,
    drain_rank_0,
    end_as,
    make_agent,
    on_signals,
    pids,
    prepare,
    rendezvous_store,
    run,
    send_signal,
    show_stacks,
)
from millrace.runtime.ranks.meeting import Gathering, Hosts, LeaderAddress, Link
from storage.stores.factory import open_store

_LOOK_SECONDS = 0.2
_GRACE_SECONDS = 3.0
"""Time for ranks to end after hosts lost each other: their exit code says more than a kill."""
_YIELD_SECONDS = 90.0
"""Longer than the controller takes to miss host 0 and to ask the pool to run its job elsewhere."""
_CONNECT_SECONDS = 3.0
_WORD_SECONDS = 60.0
"""For host 0's last word, once the ranks here have ended well."""


def main(hosts: Hosts, arguments: Sequence[str]) -> int:
    """Runs `python ARGUMENTS` as the ranks of this host, to their end. Returns the stage's exit code."""
    try:
        interface = own_interface(hosts.network, "placement.train.network")
    except InputError as error:
        send(milestone_line(f"{ERROR_PREFIX}{error}"))
        return USER_ERROR
    prepare(interface.name)
    kind = Member if hosts.host else Leader
    return kind(hosts, interface.address, arguments).run()


class Leader:
    """Host 0 of `hosts`, which the others reach at `address`. Its ranks run `python ARGUMENTS`."""

    def __init__(self, hosts: Hosts, address: str, arguments: Sequence[str]) -> None:
        self._hosts = hosts
        self._address = address
        self._arguments = arguments
        # Whether the other hosts have to be asked for their ranks' stacks.
        self._hangs = False

    def run(self) -> int:
        """Returns the stage's exit code when the ranks have ended."""
        hosts, secret = self._hosts, secrets.token_bytes(32)
        with Gathering(self._address, secret, hosts.hosts) as gathering:
            LeaderAddress(
                attempt=hosts.attempt, address=self._address, port=gathering.port, secret=secret.hex()
            ).publish(open_store(hosts.run_url))
            members = self._wait_for_hosts(gathering)
            code = self._train(gathering, members)
            for link in members.values():
                # Rank 0 ends by the signal itself if it has not begun.
                if code in (DRAINED, -signal.SIGTERM):
                    # They join the next launcher of host 0, unless they are asked to stop too.
                    link.send(again=True)
                elif code == 0:
                    link.send(over=True)
        return code

    def _wait_for_hosts(self, gathering: Gathering) -> dict[int, Link]:
        """The hosts to start with, by number, without this one."""
        hosts, heartbeats, began = self._hosts, HeartbeatSender(), time.monotonic()
        while True:
            members = gathering.present()
            here = 1 + len(members)
            waited = time.monotonic() - began
            if here == hosts.hosts or (here >= hosts.min_hosts and waited >= hosts.join_seconds):
                break
            doing = f"waiting for {hosts.hosts - here} of {hosts.hosts} hosts of the trainer"
            heartbeats.offer(Heartbeat(doing=doing, ready=False))
            time.sleep(_LOOK_SECONDS)
        if here < hosts.hosts:
            missing = ", ".join(str(host) for host in range(1, hosts.hosts) if host not in members)
            present = f"{here} of {hosts.hosts} hosts, with {here * hosts.ranks} of {hosts.hosts * hosts.ranks} ranks"
            send(milestone_line(f"the trainer starts on {present}, because host {missing} has not come"))
        else:
            addresses = ", ".join([self._address, *(link.host for link in members.values())])
            send(milestone_line(f"the trainer starts on {here} hosts: {addresses}"))
        return members

    def _train(self, gathering: Gathering, members: Mapping[int, Link]) -> int:
        """Runs the ranks of all hosts to their end. Returns the exit code of those here."""
        store = rendezvous_store(self._address)
        rendezvous = Rendezvous(address=self._address, port=store.port, run_id=uuid.uuid4().hex, hosts=1 + len(members))
        for place, link in enumerate(members.values(), start=1):
            link.send(go=asdict(replace(rendezvous, place=place)))
        agent = make_agent(self._hosts.ranks, self._arguments, rendezvous)
        on_signals(lambda: drain_rank_0(agent), lambda: self._show_stacks(agent))
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(gathering, members, agent, ended), daemon=True)
        watch.start()
        code = run(agent)
        ended.set()
        watch.join()
        return code

    def _show_stacks(self, agent: LocalElasticAgent) -> None:
        # The watching thread asks the others: this one may hold a link's lock.
        self._hangs = True
        show_stacks(agent)

    def _watch(
        self, gathering: Gathering, members: Mapping[int, Link], agent: LocalElasticAgent, ended: threading.Event
    ) -> None:
        """Watches the hosts: ends all if one is lost, and has rank 0 drain if they change."""
        change, is_asked = "", False
        while not ended.wait(_LOOK_SECONDS):
            for host, link in members.items():
                if link.next_message(0.0).get("leave"):
                    change = f"host {host} has to leave"
                if link.lost.is_set() and not ended.wait(_GRACE_SECONDS):
                    _give_up(f"host {host} of the trainer, at {link.host}, is lost: all ranks end")
            if self._hangs:
                self._hangs = False
                for link in members.values():
                    link.send(stacks=True)
            if late := [str(host) for host in gathering.present() if host not in members]:
                change = f"host {', '.join(late)} has come"
            if change and not is_asked and (ranks := pids(agent)):
                is_asked = True
                send(milestone_line(f"{change}: the trainer starts again after this step"))
                # Before rank 0 ends: from now on they expect it.
                for link in members.values():
                    link.send(again=True)
                send_signal(ranks[0], signal.SIGTERM)


class Member:
    """Host `hosts.host`, which is reached at `address`. Its ranks run `python ARGUMENTS`."""

    def __init__(self, hosts: Hosts, address: str, arguments: Sequence[str]) -> None:
        self._hosts = hosts
        self._address = address
        self._arguments = arguments
        self._store = open_store(hosts.run_url)
        self._heartbeats = HeartbeatSender()
        self._draining = False
        # Host 0's last word on the ranks that run: "again" or "over".
        self._word = ""
        self._t_last_host_0 = time.monotonic()
        self._last_log = ""

    def run(self) -> int:
        """Returns the stage's exit code when the ranks here have ended for good, or host 0 stays away."""
        threading.Thread(target=_end_with_lifeline, name="lifeline", daemon=True).start()
        while time.monotonic() - self._t_last_host_0 < _YIELD_SECONDS:
            self._beat("waiting for host 0 of the trainer", ready=False)
            link = self._connect()
            go = None if link is None else self._wait_for_go(link)
            if link is None or go is None:
                time.sleep(1.0)
                continue
            code = self._train(link, Rendezvous(**go))
            link.close()
            if code in PERMANENT:
                return code
            if self._word != "again":
                return 0 if self._word else code
            if self._draining:
                return DRAINED
            self._t_last_host_0 = time.monotonic()
        send(milestone_line(f"host 0 of the trainer has been away for {_YIELD_SECONDS:.0f} s: its job can run here"))
        return YIELDED

    def _connect(self) -> Link | None:
        """A connection to host 0 of this attempt; None if there is none now."""
        leader = LeaderAddress.find(self._store, self._hosts.attempt)
        if leader is None:
            return None
        try:
            # From this host's address in the trainer's network, by which host 0 knows it.
            connection = socket.create_connection((leader.address, leader.port), _CONNECT_SECONDS, (self._address, 0))
            link = Link(connection, bytes.fromhex(leader.secret), leads=False)
        except OSError as error:
            self._log(f"host 0 of the trainer can't be joined at {leader.address}: {error}")
            return None
        link.send(join=self._hosts.host)
        return link

    def _wait_for_go(self, link: Link) -> dict[str, Any] | None:
        """The rendezvous that host 0 sends when the ranks start; None if it refuses this host, or is lost."""
        while not link.lost.is_set():
            self._beat("waiting for other hosts of the trainer", ready=False)
            message = link.next_message(1.0)
            if "refused" in message:
                self._log(f"host 0 of the trainer refuses this host: {message['refused']}")
                return None
            self._t_last_host_0 = time.monotonic()
            if "go" in message:
                go: dict[str, Any] = message["go"]
                return go
        return None

    def _train(self, link: Link, rendezvous: Rendezvous) -> int:
        """Runs the ranks here to their end. Returns their exit code."""
        self._word = ""
        agent = make_agent(self._hosts.ranks, self._arguments, rendezvous)
        on_signals(self._drain, lambda: show_stacks(agent))
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(link, agent, ended), daemon=True)
        watch.start()
        try:
            code = run(agent)
        finally:
            ended.set()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if code == 0:
            watch.join(_WORD_SECONDS)
        return code

    def _drain(self) -> None:
        # Host 0 has rank 0 drain; the watching thread asks it to.
        self._draining = True

    def _watch(self, link: Link, agent: LocalElasticAgent, ended: threading.Event) -> None:
        """Watches host 0 until its last word: ends all if it is lost, and asks it to continue without this host."""
        has_asked = False
        while not (ended.is_set() and self._word):
            # Rank 0 waits for these ranks, so its supervisor notices if they hang.
            self._beat("training", ready=True)
            if self._draining and not has_asked:
                has_asked = True
                link.send(leave=True)
            # Looked at before the messages: what came before the loss still counts.
            is_lost = link.lost.is_set()
            message = link.next_message(1.0)
            if "stacks" in message:
                show_stacks(agent)
            self._word = next((word for word in ("over", "again") if word in message), self._word)
            if is_lost and not message:
                self._end_ranks(agent, ended)
                return

    def _end_ranks(self, agent: LocalElasticAgent, ended: threading.Event) -> None:
        """Ends the ranks here if they don't end once host 0 is lost, and this process if host 0 sent no last word."""
        if not ended.wait(_GRACE_SECONDS):
            if not self._word:
                _give_up("host 0 of the trainer is lost: all ranks here end")
            for pid in pids(agent):
                send_signal(pid, signal.SIGKILL)

    def _beat(self, doing: str, *, ready: bool) -> None:
        # If the supervisor is gone, the lifeline says so.
        with suppress(BrokenPipeError):
            self._heartbeats.offer(Heartbeat(doing=doing, ready=ready))

    def _log(self, sentence: str) -> None:
        """Prints it unless it was the last."""
        if sentence != self._last_log:
            self._last_log = sentence
            print(sentence, file=sys.stderr, flush=True)


def _end_with_lifeline() -> None:
    """Drains this launcher when standard input ends, which the supervisor holds open."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _give_up(sentence: str) -> NoReturn:
    """Ends this process, and with it its ranks, whatever its main thread does."""
    with suppress(BrokenPipeError):
        print(sentence, file=sys.stderr, flush=True)
        send(milestone_line(sentence))
    os._exit(1)


if __name__ == "__main__":
    end_as(main(Hosts.from_json(sys.argv[1]), sys.argv[2:]))
