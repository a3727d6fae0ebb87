"""torchrun for one stage: one process starts its ranks and ends as they did.

    supervisor ─► launcher ─┬─► rank 0, the stage   stdin and stdout are the supervisor's: lifeline and messages
                            └─► rank 1, 2, …        follow rank 0; stderr of all ranks is the stage's log
    SIGTERM ─► launcher ─► rank 0 drains, and its last command ends the others
    SIGUSR1 ─► launcher ─► all ranks write their stacks into the log
    a rank dies ─► launcher ends the others, then itself, by the same exit code or signal
    launcher dies, however ─► the kernel kills all ranks

    python -m millrace.runtime.ranks.launcher NUM_RANKS ARGUMENTS OF PYTHON …

The agent is torchrun's own (torch.distributed.elastic), without its restarts: the stage's task restarts the stage.
Ranks on several hosts are started by `millrace.runtime.ranks.hosts`, with the functions below.
"""

import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from millrace import parent_death
from millrace.runtime.exit_codes import FENCED, MISCOUNTED, SHOW_STACKS, USER_ERROR

_HOST, _INTERFACE = "127.0.0.1", "lo"
"""Where ranks of a single host listen: on loopback only."""
_LOOK_SECONDS = 0.1
_STACKS_SECONDS = 0.5
"""For all ranks to write their stacks; the supervisor waits twice as long."""
_MEET_SECONDS = 60
"""For all hosts to come to a rendezvous, and to end together."""
PERMANENT = (USER_ERROR, FENCED, MISCOUNTED)
"""Exit codes after which a restart would not help."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one start meet."""

    address: str
    """Of host 0 of this start."""
    port: int
    run_id: str
    """Different for each start."""
    hosts: int = 1
    place: int = 0
    """This host's place among them, in [0, hosts)."""


def prepare(interface: str) -> None:
    """Prepares this process to be a launcher whose ranks listen on this network interface only."""
    parent_death.mark_launcher()
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface)
    # torchrun's handlers would end all ranks on SIGTERM; here rank 0 drains, and the others wait for its commands.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP"


def rendezvous_store(address: str) -> TCPStore:
    """Where ranks find each other, listening at this address only; torchrun's own store would listen at all of them.

    torchrun's agent, in this process, asks for a store at the same port and gets this one.
    """
    listening = socket.create_server((address, 0))
    return TCPStore(
        address,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )


def make_agent(num_ranks: int, arguments: Sequence[str], rendezvous: Rendezvous) -> LocalElasticAgent:
    """The agent that `torchrun --rdzv-backend static` makes on one of the hosts, each with `num_ranks` ranks.

    Each rank runs `python ARGUMENTS`. No rank is restarted.
    """
    parameters = RendezvousParameters(
        backend="static",
        endpoint=f"{rendezvous.address}:{rendezvous.port}",
        run_id=rendezvous.run_id,
        min_nodes=rendezvous.hosts,
        max_nodes=rendezvous.hosts,
        rank=rendezvous.place,
        timeout=_MEET_SECONDS,
    )
    spec = WorkerSpec(
        role="train",
        local_world_size=num_ranks,
        entrypoint=sys.executable,
        args=tuple(arguments),
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=0,
        monitor_interval=_LOOK_SECONDS,
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=os.devnull), exit_barrier_timeout=_MEET_SECONDS)


def run(agent: LocalElasticAgent) -> int:
    """Runs the ranks to their end. Returns the stage's exit code; see `verdict`."""
    return verdict({rank: failure.exitcode for rank, failure in agent.run().failures.items()})


def verdict(codes: Mapping[int, int]) -> int:
    """The stage's exit code, out of `codes` by rank in the order they were seen, signals negative; 0 if there are none.

    First a permanent failure, of rank 0 or else of another rank. Then the signal that killed a rank: errors of the
    other ranks, and their end by SIGTERM, follow from that. Then the first code.
    """
    permanent = (code for code in (codes.get(0, 0), *codes.values()) if code in PERMANENT)
    if (code := next(permanent, None)) is not None:
        return code
    killed = (code for code in codes.values() if code < 0 and code != -signal.SIGTERM)
    return next(killed, next(iter(codes.values()), 0))


def end_as(code: int) -> NoReturn:
    """Ends this process with an exit code or, if it is negative, by that signal."""
    if code < 0:
        # SIGKILL has no handler to reset.
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def on_signals(drain: Callable[[], None], hang: Callable[[], None]) -> None:
    """Calls `drain` on SIGTERM, and `hang` on SIGUSR1."""
    signal.signal(signal.SIGTERM, lambda *_: drain())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(SHOW_STACKS, lambda *_: hang())


def show_stacks(agent: LocalElasticAgent) -> None:
    """Has all ranks of `agent` write their stacks into the log."""
    ranks = pids(agent)
    for pid in ranks:
        send_signal(pid, SHOW_STACKS)
        # One after the other: they write into the same log.
        time.sleep(_STACKS_SECONDS / len(ranks))


def drain_rank_0(agent: LocalElasticAgent) -> None:
    """Asks rank 0, the agent's first, to drain; ends this process by SIGTERM if no rank has started yet."""
    ranks = pids(agent)
    if not ranks:
        end_as(-signal.SIGTERM)
    send_signal(ranks[0], signal.SIGTERM)


def pids(agent: LocalElasticAgent) -> list[int]:
    """Process ids of the agent's ranks; none before they have started."""
    return [worker.id for worker in agent.get_worker_group().workers if worker.id]


def send_signal(pid: int, signal_number: int) -> None:
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        # It has just ended; torchrun's agent will notice.
        return


def main(num_ranks: int, arguments: Sequence[str]) -> int:
    """Runs `python ARGUMENTS` as `num_ranks` ranks, to their end. Returns the stage's exit code; see `verdict`."""
    prepare(_INTERFACE)
    store = rendezvous_store(_HOST)
    agent = make_agent(num_ranks, arguments, Rendezvous(address=_HOST, port=store.port, run_id=uuid.uuid4().hex))
    on_signals(lambda: drain_rank_0(agent), lambda: show_stacks(agent))
    return run(agent)


if __name__ == "__main__":
    end_as(main(int(sys.argv[1]), sys.argv[2:]))
