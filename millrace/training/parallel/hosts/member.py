"""The launcher of a host other than 0: joins host 0, starts its ranks when told to, and joins again when told to.

host 0 unknown or away ─► found in the run's store, joined ─► go ─► ranks train ─► over
         │                        ▲                                     │ again
         │                        └─────────────────────────────────────┘
         └─ for too long ─► YIELDED: this host is free for the job of host 0
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from millrace.runtime.exit_codes import DRAINED, YIELDED
from millrace.runtime.messages import Heartbeat, HeartbeatSender, milestone_line, send
from millrace.training.parallel.agent import (
    PERMANENT,
    Rendezvous,
    make_agent,
    on_signals,
    pids,
    run,
    send_signal,
    show_stacks,
    verdict,
)
from millrace.training.parallel.hosts.address import find
from millrace.training.parallel.hosts.leader import GRACE_SECONDS, give_up
from millrace.training.parallel.hosts.link import Link
from millrace.training.parallel.hosts.network import Hosts
from storage.stores.factory import open_store

_YIELD_SECONDS = 90.0
"""Longer than the controller takes to miss host 0 and to ask the pool to run its job elsewhere."""
_CONNECT_SECONDS = 3.0
_LOOK_SECONDS = 1.0
_WORD_SECONDS = 60.0
"""For host 0's last word, once the ranks here have ended well."""


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
        self._alone_since = time.monotonic()
        self._said = ""

    def run(self) -> int:
        """Returns the stage's exit code when the ranks here have ended for good, or host 0 stays away."""
        threading.Thread(target=_end_with_lifeline, name="lifeline", daemon=True).start()
        while time.monotonic() - self._alone_since < _YIELD_SECONDS:
            self._beat("waiting for host 0 of the trainer", ready=False)
            link = self._connect()
            go = None if link is None else self._wait_for_go(link)
            if link is None or go is None:
                time.sleep(_LOOK_SECONDS)
                continue
            code = self._train(link, Rendezvous(**go))
            link.close()
            if code in PERMANENT:
                return code
            if self._word != "again":
                return 0 if self._word else code
            if self._draining:
                return DRAINED
            self._alone_since = time.monotonic()
        send(milestone_line(f"host 0 of the trainer has been away for {_YIELD_SECONDS:.0f} s: its job can run here"))
        return YIELDED

    def _connect(self) -> Link | None:
        """A connection to host 0 of this attempt; None if it can't be had now."""
        leader = find(self._store, self._hosts.attempt)
        if leader is None:
            return None
        try:
            # From the own address in the trainer's network, by which host 0 knows this host.
            connection = socket.create_connection((leader.address, leader.port), _CONNECT_SECONDS, (self._address, 0))
            link = Link(connection, bytes.fromhex(leader.secret), leads=False)
        except OSError as error:
            self._log(f"host 0 of the trainer can't be joined at {leader.address}: {error}")
            return None
        link.send(join=self._hosts.host)
        return link

    def _wait_for_go(self, link: Link) -> dict[str, Any] | None:
        """What host 0 says when the ranks are to start; None if it does not want this host, or is lost."""
        while not link.lost.is_set():
            self._beat("waiting for other hosts of the trainer", ready=False)
            message = link.next_message(_LOOK_SECONDS)
            if "refused" in message:
                self._log(f"host 0 of the trainer refuses this host: {message['refused']}")
                return None
            self._alone_since = time.monotonic()
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
            code = verdict(run(agent))
        finally:
            ended.set()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if code == 0:
            watch.join(_WORD_SECONDS)
        return code

    def _beat(self, doing: str, *, ready: bool) -> None:
        # If the supervisor is gone, the lifeline says so.
        with suppress(BrokenPipeError):
            self._heartbeats.offer(Heartbeat(doing=doing, ready=ready))

    def _log(self, sentence: str) -> None:
        """Prints it unless it was the last."""
        if sentence != self._said:
            self._said = sentence
            print(sentence, file=sys.stderr, flush=True)

    def _drain(self) -> None:
        # Host 0 has rank 0 drain; the watching thread asks it to.
        self._draining = True

    def _watch(self, link: Link, agent: LocalElasticAgent, ended: threading.Event) -> None:
        """Until host 0's last word: ends all if it is lost, and tells it if this host has to leave."""
        told = False
        while not (ended.is_set() and self._word):
            # Rank 0 waits for these ranks, so its supervisor notices if they hang.
            self._beat("training", ready=True)
            if self._draining and not told:
                told = True
                link.send(leave=True)
            # Looked at before the messages: what came before the loss still counts.
            lost = link.lost.is_set()
            message = link.next_message(_LOOK_SECONDS)
            if "stacks" in message:
                show_stacks(agent)
            self._word = next((word for word in ("over", "again") if word in message), self._word)
            if lost and not message:
                self._end_ranks(agent, ended)
                return

    def _end_ranks(self, agent: LocalElasticAgent, ended: threading.Event) -> None:
        """Host 0 has gone: ends the ranks here unless they end by themselves, and all if it said no word before."""
        if not ended.wait(GRACE_SECONDS):
            if not self._word:
                give_up("host 0 of the trainer is lost: all ranks here end")
            for pid in pids(agent):
                send_signal(pid, signal.SIGKILL)


def _end_with_lifeline() -> None:
    """Drains this launcher when standard input ends, which the supervisor holds open."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
