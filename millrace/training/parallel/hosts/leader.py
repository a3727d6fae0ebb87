"""The launcher of host 0: gathers the hosts, starts the ranks on all of them, and starts them again when hosts change.

hosts come ─► enough? ─► go ─► ranks train ─► ended ─► over
      ▲                           │ a host comes late, or has to leave
      └─────────── again ◄── rank 0 drains: it finishes its step and checkpoints
"""

import os
import secrets
import signal
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import NoReturn

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from millrace.runtime.exit_codes import DRAINED
from millrace.runtime.messages import Heartbeat, HeartbeatSender, milestone_line, send
from millrace.training.parallel.agent import (
    Rendezvous,
    drain_rank_0,
    make_agent,
    on_signals,
    pids,
    rendezvous_store,
    run,
    send_signal,
    show_stacks,
    verdict,
)
from millrace.training.parallel.hosts.address import LeaderAddress, publish
from millrace.training.parallel.hosts.gathering import Gathering
from millrace.training.parallel.hosts.link import Link
from millrace.training.parallel.hosts.network import Hosts
from storage.stores.factory import open_store

GRACE_SECONDS = 3.0
"""When hosts lose each other: for the ranks here to end by themselves, with an exit code that says more."""
_LOOK_SECONDS = 0.2


class Leader:
    """Host 0 of `hosts`, which the others reach at `address`. Its ranks run `python ARGUMENTS`."""

    def __init__(self, hosts: Hosts, address: str, arguments: Sequence[str]) -> None:
        self._hosts = hosts
        self._address = address
        self._arguments = arguments
        # Why the ranks are to start again, once there is a reason.
        self._again = ""
        self._draining = False
        # Whether the other hosts are to be told to show their ranks' stacks.
        self._hangs = False

    def run(self) -> int:
        """Returns the stage's exit code when the ranks have ended for good."""
        secret = secrets.token_bytes(32)
        with Gathering(self._address, secret, self._hosts.hosts) as gathering:
            own = LeaderAddress(
                attempt=self._hosts.attempt, address=self._address, port=gathering.port, secret=secret.hex()
            )
            publish(open_store(self._hosts.run_url), own)
            while True:
                members = self._wait_for_hosts(gathering)
                code = self._train(gathering, members)
                # Rank 0 ends by the signal itself if it has not begun.
                drained = code in (DRAINED, -signal.SIGTERM)
                for link in members.values():
                    if drained:
                        # They join again, here or at a successor, unless they are asked to stop too.
                        link.send(again=True)
                    elif code == 0:
                        link.send(over=True)
                if not drained or not self._again or self._draining:
                    return code
                for link in members.values():
                    link.close()

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
            found = f"{here} of {hosts.hosts} hosts, with {here * hosts.ranks} of {hosts.hosts * hosts.ranks} ranks"
            send(milestone_line(f"the trainer starts on {found}, because host {missing} has not come"))
        else:
            addresses = ", ".join([self._address, *(link.host for link in members.values())])
            send(milestone_line(f"the trainer starts on {here} hosts: {addresses}"))
        return members

    def _train(self, gathering: Gathering, members: Mapping[int, Link]) -> int:
        """Runs the ranks of all hosts to their end. Returns the exit code of those here."""
        self._again = ""
        store = rendezvous_store(self._address)
        rendezvous = Rendezvous(address=self._address, port=store.port, run_id=uuid.uuid4().hex, hosts=1 + len(members))
        for place, link in enumerate(members.values(), start=1):
            link.send(go=asdict(replace(rendezvous, place=place)))
        agent = make_agent(self._hosts.ranks, self._arguments, rendezvous)
        on_signals(lambda: self._drain(agent), lambda: self._show_stacks(agent))
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(gathering, members, agent, ended), daemon=True)
        watch.start()
        code = verdict(run(agent))
        ended.set()
        watch.join()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return code

    def _drain(self, agent: LocalElasticAgent) -> None:
        self._draining = True
        drain_rank_0(agent)

    def _show_stacks(self, agent: LocalElasticAgent) -> None:
        # The watching thread tells the others: this one may hold a link's lock.
        self._hangs = True
        show_stacks(agent)

    def _watch(
        self, gathering: Gathering, members: Mapping[int, Link], agent: LocalElasticAgent, ended: threading.Event
    ) -> None:
        """Until the ranks have ended: ends all if a host is lost, and has rank 0 drain if the hosts change."""
        asked = False
        while not ended.wait(_LOOK_SECONDS):
            for host, link in members.items():
                if link.next_message(0.0).get("leave"):
                    self._start_again(members, f"host {host} has to leave")
                if link.lost.is_set() and not ended.wait(GRACE_SECONDS):
                    give_up(f"host {host} of the trainer, at {link.host}, is lost: all ranks end")
            if self._hangs:
                self._hangs = False
                for link in members.values():
                    link.send(stacks=True)
            if late := gathering.late(members):
                self._start_again(members, f"host {', '.join(map(str, late))} has come")
            if self._again and not asked and (ranks := pids(agent)):
                asked = True
                send_signal(ranks[0], signal.SIGTERM)

    def _start_again(self, members: Mapping[int, Link], why: str) -> None:
        if self._again:
            return
        self._again = why
        send(milestone_line(f"{why}: the trainer starts again after this step"))
        # Before rank 0 ends: from now on they expect it.
        for link in members.values():
            link.send(again=True)


def give_up(sentence: str) -> NoReturn:
    """Ends this process, and with it its ranks, whatever its main thread does."""
    with suppress(BrokenPipeError):
        print(sentence, file=sys.stderr, flush=True)
        send(milestone_line(sentence))
    os._exit(1)
